"""Rendering of compositions over several nodes as text."""

from __future__ import annotations

from collections.abc import Sequence

from mpicoll.schedules.node_composition import Nodes, Part, Row, compose


def draw(collective: str, node_sizes: Sequence[int], *, segments: int = 1) -> list[str]:
    """Return the rows of a collective over several nodes as lines of text, below the ranks of nodes and lanes.

    Parameters
    ----------
    node_sizes
        Ranks of each node; ranks are numbered node by node.
    """
    firsts = [sum(node_sizes[:node]) for node in range(len(node_sizes))]
    nodes = [range(first, first + count) for first, count in zip(firsts, node_sizes, strict=True)]
    lanes = [[ranks[lane] for ranks in nodes] for lane in range(min(node_sizes))]
    rows = compose(collective, segments=segments, nodes=len(node_sizes))
    pieces = {row.part.piece for row in rows}
    lines = [f"nodes   {_groups(nodes)}", f"lanes   {_groups(lanes)}", ""]
    return lines + [_line(number, row, collective, len(pieces)) for number, row in enumerate(_joined(rows), 1)]


def _groups(groups: Sequence[Sequence[int]]) -> str:
    return " | ".join(" ".join(map(str, ranks)) for ranks in groups)


def _joined(rows: Sequence[Row]) -> list[tuple[str, Row]]:
    """Return the rows with their verbs; a start that is followed by its wait is one line."""
    lines: list[tuple[str, Row]] = []
    for row in rows:
        if lines and not row.starts and lines[-1] == ("start", Row(row.part, True)):
            lines[-1] = ("start and wait", row)
        else:
            lines.append(("start" if row.starts else "wait", row))
    return lines


def _line(number: int, line: tuple[str, Row], collective: str, pieces: int) -> str:
    verb, row = line
    text = f"{number:3d}   {verb:16s}{_named(row.part, collective, pieces)}"
    if row.part.nodes is not Nodes.ALL:
        text += f", on {row.part.nodes.value}"
    if row.aside is not None:
        text += f", while {_named(row.aside, collective, pieces)} progresses"
    return text


def _named(part: Part, collective: str, pieces: int) -> str:
    if collective == "barrier" or pieces == 1 or (not part.inside and collective != "allreduce"):
        return str(part)
    return f"{part} ({'segment' if collective == 'allreduce' else 'parts of node'} {part.piece})"
