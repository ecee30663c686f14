"""Types of the trainer's options: converters that argparse calls."""

from __future__ import annotations

import argparse
import math
import re
from typing import Any

from mpicoll.train.config import MODELS, OWN_MODEL

_MOST_DIGITS = 18
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def integer(least: int) -> Any:
    """Return a converter to whole numbers of at least `least`."""

    def convert(text: str) -> int:
        if re.fullmatch(r"[0-9]+", text) and len(text) > _MOST_DIGITS:
            raise argparse.ArgumentTypeError(f"{text!r:.60} is too large, with more than {_MOST_DIGITS} digits")
        if not re.fullmatch(r"[0-9]+", text) or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return convert


def real(least: float, below: float = math.inf, *, open_start: bool = False) -> Any:
    """Return a converter to numbers of at least `least`, above it with `open_start`, and below `below`."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (least <= value < below) or (open_start and value == least):
            start = "above" if open_start else "of at least"
            end = "" if below == math.inf else f" and below {below:g}"
            raise argparse.ArgumentTypeError(f"{text!r} is not a number {start} {least:g}{end}")
        return value

    return convert


def power_of_two(text: str) -> float:
    """Convert ``65536`` or ``0.5`` to a power of two from 2**-14 to 2**24."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (2.0**-14 <= value <= 2.0**24 and math.frexp(value)[0] == 0.5):
        raise argparse.ArgumentTypeError(f"{text!r} is not a power of two from 2**-14 to 2**24")
    return value


def widths(text: str) -> tuple[int, ...]:
    """Convert ``256,128`` to whole numbers from 1 on."""
    if not re.fullmatch(r"[1-9]\d{0,8}(,[1-9]\d{0,8})*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of widths such as 64 or 128,64")
    return tuple(int(width) for width in text.split(","))


def names(text: str) -> tuple[str, ...]:
    """Convert ``a,b`` to names."""
    found = tuple(name.strip() for name in text.split(","))
    if not all(found) or len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of different names such as price or a,b")
    return found


def nbytes(text: str) -> int:
    """Convert ``65536``, ``64K`` or ``4M`` to a number of bytes."""
    match = re.fullmatch(r"([1-9]\d{0,12})([kmg]?)(?:i?b)?", text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes such as 65536, 64K or 4M")
    return int(match[1]) * _UNITS[match[2]]


def model(text: str) -> str:
    """Return the name of a model, or of a function that returns one, if it has the form of one."""
    if text in MODELS or OWN_MODEL.fullmatch(text):
        return text
    raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(MODELS)}, nor of the form package.module:factory")
