"""The run itself, inside Locust and gevent. Only processes that want gevent import this package."""
