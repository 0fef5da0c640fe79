"""`python -m tritandem.cli`."""

import sys

from .main import main

sys.exit(main())
