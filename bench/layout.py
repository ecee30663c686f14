"""Tables as text."""

from __future__ import annotations

from collections.abc import Sequence

Cells = Sequence[Sequence[str]]
"""Rows of as many cells each, the header first."""


def plain(cells: Cells) -> list[str]:
    """Return lines whose cells stand under each other."""
    widths = _widths(cells)
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]


def markdown(cells: Cells, names: int = 1) -> list[str]:
    """Return lines for a document, which a terminal shows in columns as well; the first `names` hold no numbers."""
    widths = [max(3 if column < names else 4, width) for column, width in enumerate(_widths(cells))]
    lines = []
    for line in cells:
        padded = [
            cell.ljust(width) if column < names else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        lines.append(f"| {' | '.join(padded)} |")
    rule = ["-" * width if column < names else "-" * (width - 1) + ":" for column, width in enumerate(widths)]
    return [lines[0], f"| {' | '.join(rule)} |", *lines[1:]]


def _widths(cells: Cells) -> list[int]:
    return [max(map(len, column)) for column in zip(*cells, strict=True)]
