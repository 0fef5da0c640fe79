"""Types of flags: numbers within bounds. A refusal says what was given and what is allowed."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """A whole number from `least` to `most`, or without an upper end."""
    allowed = f"a whole number, {least} or more" if most is None else f"a whole number from {least} to {most}"

    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit()) or not least <= int(text) <= (int(text) if most is None else most):
            raise argparse.ArgumentTypeError(f"given {text!r}, allowed: {allowed}")
        return int(text)

    return parse


def number(least: float, most: float) -> Callable[[str], float]:
    """A number from `least` to `most`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:  # refuses NaN as well
            raise argparse.ArgumentTypeError(f"given {text!r}, allowed: a number from {least:g} to {most:g}")
        return value

    return parse


DAY_S = 86_400
seconds = number(0, DAY_S)
