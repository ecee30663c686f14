import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpicoll.data.sampler import batch_of_rank, epoch_order, part, steps_per_epoch

counts, batches, sizes = st.integers(1, 300), st.integers(1, 80), st.integers(1, 70)


@given(counts, batches, sizes, st.integers(0, 5))
def test_each_sample_is_used_exactly_once_an_epoch(count, batch, size, epoch):
    order = epoch_order(count, 7, epoch)
    used = [
        batch_of_rank(order, step, batch, size, rank)[0]
        for step in range(steps_per_epoch(count, batch))
        for rank in range(size)
    ]
    np.testing.assert_array_equal(np.sort(np.concatenate(used)), np.arange(count))


@given(counts, batches, sizes)
def test_a_batch_holds_the_same_samples_on_any_number_of_ranks(count, batch, size):
    order = epoch_order(count, 0, 0)
    for step in range(steps_per_epoch(count, batch)):
        shares = [batch_of_rank(order, step, batch, size, rank) for rank in range(size)]
        whole = order[step * batch : (step + 1) * batch]
        np.testing.assert_array_equal(np.concatenate([indices for indices, _ in shares]), whole)
        assert {total for _, total in shares} == {len(whole)}
        lengths = [len(indices) for indices, _ in shares]
        assert max(lengths) - min(lengths) <= 1


@given(st.integers(0, 10**12), st.integers(1, 10**6))
def test_parts_join_without_gaps(count, size):
    assert part(count, size, 0)[0] == 0
    assert part(count, size, size - 1)[1] == count
    for rank in {1, size // 2, size - 1} & set(range(1, size)):
        assert part(count, size, rank - 1)[1] == part(count, size, rank)[0]


def test_order_changes_with_seed_and_epoch_only():
    order = epoch_order(100, 1, 2)
    np.testing.assert_array_equal(order, epoch_order(100, 1, 2))
    assert (order != epoch_order(100, 1, 3)).any()
    assert (order != epoch_order(100, 2, 2)).any()


@pytest.mark.parametrize(("count", "batch", "expected"), [(10, 3, 4), (9, 3, 3), (1, 100, 1), (100, 1, 100)])
def test_steps_per_epoch_counts_the_short_batch(count, batch, expected):
    assert steps_per_epoch(count, batch) == expected
