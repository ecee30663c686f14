"""Compositions over several nodes: proved for many shapes of nodes, and planted errors are found."""

from __future__ import annotations

import pytest

from mpicoll.schedules.node_composition import COLLECTIVES, Row, compose, verify
from mpicoll.schedules.replay import ScheduleError

SHAPES = [(1, 1), (2, 2), (3, 1), (1, 2, 5), (4, 4, 4), (3, 5), (7, 1), (2, 2, 2, 2)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_composition_is_correct(collective: str, shape: tuple[int, ...]) -> None:
    if collective in ("allgather", "reduce_scatter") and len(set(shape)) > 1:
        pytest.skip("ranks of unequal nodes own no parts of one lane")
    for root in range(sum(shape)):
        for segments in (1, 2, 3, 8) if collective == "allreduce" else (1,):
            verify(collective, shape, root=root, segments=segments)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_part_that_is_missing_is_found(collective: str) -> None:
    for shape in ((2, 2), (3, 3, 3)):
        rows = compose(collective, segments=2, nodes=len(shape))
        for part in {row.part for row in rows}:
            kept = [row._replace(aside=None) for row in rows if row.part != part]
            with pytest.raises(ScheduleError):
                verify(collective, shape, root=1, segments=2, rows=kept)


def test_parts_that_overlap_are_found() -> None:
    rows = list(compose("allreduce", segments=2))
    place = next(number for number, row in enumerate(rows) if not row.starts and not row.part.inside)
    rows.insert(place + 2, rows.pop(place))  # the lane's next allreduce starts before the wait for the last one
    with pytest.raises(ScheduleError, match="started while another one is under way"):
        verify("allreduce", (2, 2), segments=2, rows=rows)


def test_waits_that_are_missing_are_found() -> None:
    rows = compose("allreduce", segments=1)
    for place, row in enumerate(rows):
        if not row.starts:
            with pytest.raises(ScheduleError):
                verify("allreduce", (2, 2), rows=rows[:place] + rows[place + 1 :])


def test_a_contribution_that_is_counted_twice_is_found() -> None:
    rows = compose("allreduce")
    twice = [row for row in rows if row.part.inside][:2]
    with pytest.raises(ScheduleError, match="counted twice"):
        verify("allreduce", (2, 2), rows=(*twice, *twice, *rows[2:]))


def test_the_network_is_busy_while_the_node_works() -> None:
    """Of 8 segments the lane carries one during all work inside but the first reduction and the last gathering."""
    inside = [row for row in compose("allreduce", segments=8) if row.part.inside and not row.starts]
    assert [row.aside is None for row in inside] == [True] + [False] * (len(inside) - 2) + [True]
    assert all(isinstance(row, Row) for row in inside)
