"""Parsing and formatting of numbers for command lines and tables."""

from __future__ import annotations

import argparse
import contextlib
import re
from collections.abc import Iterable, Sequence

from mpicoll.environment import is_whole_number

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


def parse_nbytes(text: str) -> int:
    """Read ``4096``, ``64K``, ``1MB`` or ``2GiB`` (powers of 1024)."""
    match = re.fullmatch(r"(\d+)\s*([kmg]?)(?:i?b)?", text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes such as 4096, 64K or 1MB")
    return int(match[1]) * _UNITS[match[2]]


def parse_seconds(text: str) -> float:
    """Read ``5ms``, ``200us``, ``0.1s``, or ``0``: seconds of a time with its unit."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(us|ms|s)|0", text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 5ms, 200us or 0.1s")
    return float(match[1]) * _SECONDS[match[2]] if match[1] else 0.0


def parse_rate(text: str) -> float:
    """Read ``1gbit`` or ``100mbit``: 10^9 bits per second of a rate with its unit."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([gm])bit", text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a rate such as 1gbit or 100mbit")
    return float(match[1]) * (1.0 if match[2] == "g" else 1e-3)


def positive(text: str) -> int:
    """Read a whole number above zero."""
    if not is_whole_number(text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def whole_number(text: str) -> int:
    """Read a whole number, 0 or above."""
    if not is_whole_number(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 0 or more")
    return int(text)


def positive_number(text: str) -> float:
    """Read a finite number above zero."""
    with contextlib.suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")


def format_nbytes(nbytes: int) -> str:
    """Format a number of bytes: ``96 B``, ``4 KB``, ``2 MB`` (powers of 1024, only if exact)."""
    for unit, factor in (("GB", 1 << 30), ("MB", 1 << 20), ("KB", 1 << 10)):
        if nbytes >= factor and nbytes % factor == 0:
            return f"{nbytes // factor} {unit}"
    return f"{nbytes} B"


def format_seconds(seconds: float) -> str:
    """Format a time with three significant digits: ``4.27 us``, ``31.9 ms``, ``2.5 s``."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def counted(count: int, what: str, plural: str | None = None) -> str:
    """Return a number with the name of what is counted: ``1 rank``, ``2 ranks``, ``0 ranks``.

    `plural` is for names that take no ``s``.
    """
    return f"{count} {what if count == 1 else plural or what + 's'}"


def alternatives(words: Iterable[str]) -> str:
    """Return words as a choice between them: ``adam``, ``adam or lamb``, ``adam, adamw or lamb``."""
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last


def aligned(rows: Sequence[Sequence[str]], names: int = 1) -> list[list[str]]:
    """Return rows with the cells of each column padded to one width.

    The first `names` columns are left-aligned, the others right-aligned. All rows have the same number of cells.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        [
            cell.ljust(width) if i < names else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    ]


def table(rows: Sequence[Sequence[str]], names: int = 1) -> list[str]:
    """Return the lines of a table; see :func:`aligned`."""
    return ["  ".join(row).rstrip() for row in aligned(rows, names)]
