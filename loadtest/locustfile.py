"""The plug for `locust -f loadtest/locustfile.py`: flags, web page and the streaming user come from the package."""

from tritandem_loadtest.locust_run import plug  # noqa: F401  (registers its listeners)
from tritandem_loadtest.locust_run.user import StreamUser

__all__ = ["StreamUser"]
