"""`python -m tritandem_loadtest ...` is `tritandem-loadtest ...`."""

import sys

from .cli import main

sys.exit(main())
