"""`python -m tritandem_client`."""

import sys

from tritandem_client.cli import main

sys.exit(main())
