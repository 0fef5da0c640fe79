"""Tells a call that was cancelled from a task that is: both reach whoever waits as asyncio.CancelledError."""

from __future__ import annotations

import asyncio


def the_call_was(cancelled_here: bool) -> bool:
    """Inside `except asyncio.CancelledError`. `cancelled_here`: by this side's own `cancel`.

    A closed client cancels its calls, too; only from Python 3.11 on a task knows that it is not the one.
    """
    cancelling = getattr(asyncio.current_task(), "cancelling", None)
    return cancelled_here if cancelling is None else cancelling() == 0
