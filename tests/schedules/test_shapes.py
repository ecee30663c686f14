"""Steps, bytes and costs are those of the textbook."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpicoll.errors import UnknownAlgorithm
from mpicoll.schedules import chunk_bounds, find
from mpicoll.schedules.cost import price, traffic

POWERS = (2, 4, 8, 16, 32)


def cost(collective: str, name: str, size: int, segments: int = 1):
    return price([find(collective, name).schedule(size, rank, segments=segments) for rank in range(size)], 1 << 20)


@pytest.mark.parametrize("size", [2, 3, 5, 8, 13])
def test_ring(size: int) -> None:
    found = cost("allreduce", "ring", size)
    share = Fraction(size - 1, size)
    assert (found.steps, found.sent, found.reduced) == (2 * (size - 1), 2 * share, share)


@pytest.mark.parametrize("size", POWERS)
def test_halving_doubling_and_swing(size: int) -> None:
    share = Fraction(size - 1, size)
    for name in ("halving_doubling", "swing"):
        found = cost("allreduce", name, size)
        assert (found.steps, found.sent, found.reduced) == (2 * (size.bit_length() - 1), 2 * share, share)


@pytest.mark.parametrize("size", POWERS)
def test_recursive_doubling_and_trees(size: int) -> None:
    levels = size.bit_length() - 1
    found = cost("allreduce", "recursive_doubling", size)
    assert (found.steps, found.sent, found.reduced) == (levels, levels, levels)
    assert cost("bcast", "tree", size).steps == levels
    assert cost("reduce", "tree", size).steps == levels
    assert cost("allreduce", "tree", size).steps == 2 * levels


@pytest.mark.parametrize("size", [2, 3, 7, 8, 9, 64])
def test_bruck_and_dissemination_take_the_logarithm_rounded_up(size: int) -> None:
    levels = (size - 1).bit_length()
    assert cost("allgather", "bruck", size).steps == levels
    assert cost("barrier", "dissemination", size).steps == levels
    assert cost("allgather", "bruck", size).sent == Fraction(size - 1, size)


@pytest.mark.parametrize("size", [2, 3, 4, 8, 9])
@pytest.mark.parametrize("segments", [1, 4])
def test_chains_take_a_step_for_each_rank_and_one_for_each_segment_after_the_first(size: int, segments: int) -> None:
    """Ranks wait for their turn in steps without messages, which cost nothing."""
    steps, passed = size - 1 + segments - 1, 1 + Fraction(size - 2, segments)
    found = cost("scan", "chain", size, segments)
    assert (found.steps, found.sent, found.reduced) == (steps, passed, passed)
    found = cost("exscan", "chain", size, segments)  # one step is a shift of whole vectors
    assert found.steps == (1 if size == 2 else 1 + size - 2 + segments - 1)
    assert found.reduced == (0 if size == 2 else 1 + Fraction(size - 3, segments))


@pytest.mark.parametrize("size", [2, 3, 5, 8, 13])
def test_steps_of_the_other_algorithms(size: int) -> None:
    levels = (size - 1).bit_length()
    steps = {
        ("reduce_scatter", "pairwise"): size - 1,
        ("reduce_scatter", "ring"): size - 1,
        ("allgather", "ring"): size - 1,
        ("alltoall", "pairwise"): size - 1,
        ("alltoall", "linear"): size - 1,
        ("gather", "linear"): 1,
        ("scatter", "linear"): 1,
        ("gather", "tree"): levels,
        ("scatter", "tree"): levels,
        ("reduce", "ring"): size,
        ("bcast", "scatter_allgather"): levels + size - 1,
        ("scan", "recursive_doubling"): levels,
        ("exscan", "recursive_doubling"): 1 + (size - 2).bit_length(),
    }
    assert {key: cost(*key, size).steps for key in steps} == steps


@pytest.mark.parametrize("size", [4, 7, 8, 16, 31])
def test_double_tree_approaches_two_vectors_with_many_segments(size: int) -> None:
    schedules = [find("allreduce", "double_tree").schedule(size, rank, segments=32) for rank in range(size)]
    assert max(traffic(schedule).sent for schedule in schedules) <= 2
    assert len({schedule.chunks for schedule in schedules}) == 1
    assert cost("allreduce", "double_tree", size, 32).sent < 3


@given(st.integers(0, 10**12), st.integers(1, 1000))
def test_chunks_cover_everything_and_differ_by_one_at_most(count: int, chunks: int) -> None:
    bounds = chunk_bounds(count, chunks)
    lengths = [after - before for before, after in pairwise(bounds)]
    assert (bounds[0], bounds[-1], len(lengths)) == (0, count, chunks)
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


def test_names_and_numbers_that_do_not_exist() -> None:
    with pytest.raises(UnknownAlgorithm, match=r"'rings'.*allreduce.*ring"):
        find("allreduce", "rings")
    ring = find("allreduce", "ring")
    for size, rank, root, message in ((0, 0, 0, "size: 0"), (3, 3, 0, "rank: 3"), (3, 0, -1, "root: -1")):
        with pytest.raises(ValueError, match=message):
            ring.schedule(size, rank, root=root)
