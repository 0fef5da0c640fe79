"""A package that remembers which thread imported it."""

from __future__ import annotations

import threading

BY = threading.current_thread().name
