"""Shares of batches by the pace of replicas, without ranks."""

import numpy as np
import pytest

from mpicoll.train.load_balance import LoadBalance


def take_steps(balance, seconds_per_sample, batch, rounds, overhead=0.0, noise=0.0):
    """Let replicas take `rounds` times 8 steps; return the seconds of each in the last ones."""
    random = np.random.default_rng(0)
    for _ in range(rounds):
        seconds = overhead + np.array(seconds_per_sample) * balance.counts(batch)
        rows = np.repeat(seconds[None], 8, axis=0) * (1 + noise * random.random((8, seconds.size)))
        balance.add(rows)
    return overhead + np.array(seconds_per_sample) * balance.counts(batch)


@pytest.mark.parametrize("overhead", [0.0, 0.05])
@pytest.mark.parametrize("paces", [[1, 5, 1, 1], [1, 1, 1, 1], [1, 2, 3, 4, 5, 6, 7, 8], [100, 1]])
def test_all_take_equally_long_in_the_end(paces, overhead):
    balance = LoadBalance(len(paces), 1, 4096)
    seconds = take_steps(balance, np.array(paces) * 1e-3, 4096, 30, overhead)
    assert seconds.max() <= 1.05 * seconds.mean()
    if overhead == 0:
        ideal = (1 / np.array(paces)) / (1 / np.array(paces)).sum()
        np.testing.assert_allclose(balance.shares, ideal, rtol=0.1)


def test_every_sample_has_one_owner_and_no_part_is_empty():
    random = np.random.default_rng(1)
    for _ in range(300):
        replicas = int(random.integers(1, 10))
        balance = LoadBalance(replicas, 1, 64)
        shares = random.random(replicas) ** 8 + 1e-9
        balance.shares = shares / shares.sum()
        for count in (0, 1, replicas - 1, replicas, 7, 64, 1000):
            parts = [balance.part(count, replica) for replica in range(replicas)]
            assert [start for start, _ in parts] == [0, *(stop for _, stop in parts[:-1])]
            assert parts[-1][1] == count
            assert all(start < stop for start, stop in parts) or count < replicas


def test_equal_shares_are_the_parts_of_a_run_without_balance():
    balance = LoadBalance(4, 1, 32)
    assert balance.counts(32).tolist() == [8, 8, 8, 8]
    assert balance.counts(34).tolist() == [9, 9, 8, 8]
    assert balance.counts(3).tolist() == [1, 1, 1, 0]


def test_noise_does_not_move_the_shares():
    balance = LoadBalance(4, 1, 512)
    take_steps(balance, [1e-3] * 4, 512, 20, noise=0.02)
    assert balance.state() == [0.25] * 4


def test_the_first_step_and_single_hiccups_do_not_count():
    balance = LoadBalance(2, 1, 64)
    balance.add(np.array([[9.0, 0.1]]))
    balance.add(np.array([[0.1, 0.1]] * 7 + [[5.0, 0.1]]))
    assert balance.state() == [0.5, 0.5]
    balance.add(np.array([[0.3, 0.1]] * 3))
    assert balance.state() == [0.5, 0.5]  # too few steps
    balance.add(np.array([[0.3, 0.1]]))
    np.testing.assert_allclose(balance.shares, [0.25, 0.75])


def test_the_slowest_rank_of_a_replica_decides():
    balance = LoadBalance(2, 2, 64)
    balance.add(np.array([[0.1, 0.1, 0.1, 0.3]] * 9))
    np.testing.assert_allclose(balance.shares, [0.75, 0.25])


@pytest.mark.parametrize("found", [None, [0.5], [0.2, 0.3, 0.5], ["a", "b"], [-1.0, 2.0], [0.0, 1.0], "xy", [1, 1]])
def test_shares_of_another_run_are_not_taken(found):
    balance = LoadBalance(2, 1, 64)
    balance.load(found)
    assert balance.state() == [0.5, 0.5]


def test_shares_go_through_a_checkpoint():
    balance, other = LoadBalance(2, 1, 64), LoadBalance(2, 1, 64)
    balance.add(np.array([[0.1, 0.3]] * 9))
    other.load(balance.state())
    assert other.state() == balance.state() != [0.5, 0.5]
