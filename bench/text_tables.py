"""Tables as text."""

from __future__ import annotations

from collections.abc import Sequence

from mpicoll.quantities import aligned, table

Cells = Sequence[Sequence[str]]
"""Rows of as many cells each, the header first."""


def plain(cells: Cells) -> list[str]:
    """Return lines whose cells stand under each other."""
    return table(cells, names=0)


def markdown(cells: Cells, names: int = 1) -> list[str]:
    """Return lines for a document, which a terminal shows in columns as well; the first `names` hold no numbers."""
    least = ["-" * 3 if column < names else "-" * 4 for column in range(len(cells[0]))]
    header, blank, *rest = aligned([cells[0], least, *cells[1:]], names)
    rule = ["-" * len(cell) if i < names else "-" * (len(cell) - 1) + ":" for i, cell in enumerate(blank)]
    return [f"| {' | '.join(row)} |" for row in (header, rule, *rest)]
