"""Numbers as people write them on command lines and read them in tables."""

from __future__ import annotations

import argparse
import re

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def parse_nbytes(text: str) -> int:
    """Read ``4096``, ``64K``, ``1MB`` or ``2GiB`` (powers of 1024)."""
    match = re.fullmatch(r"(\d+)\s*([kmg]?)(?:i?b)?", text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes such as 4096, 64K or 1MB")
    return int(match[1]) * _UNITS[match[2]]


def positive(text: str) -> int:
    """Read a whole number above zero."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def format_nbytes(nbytes: int) -> str:
    """Write a length as people do: ``96 B``, ``4 KB``, ``2 MB``."""
    for unit, factor in (("GB", 1 << 30), ("MB", 1 << 20), ("KB", 1 << 10)):
        if nbytes >= factor and nbytes % factor == 0:
            return f"{nbytes // factor} {unit}"
    return f"{nbytes} B"


def format_seconds(seconds: float) -> str:
    """Write a time with three digits: ``4.27 us``, ``31.9 ms``, ``2.5 s``."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def table(rows: list[list[str]]) -> list[str]:
    """Return rows as lines with aligned columns, the first column to the left."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]

    def line(row: list[str]) -> str:
        first, *others = zip(row, widths, strict=True)
        return "  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)])

    return [line(row) for row in rows]
