"""Synchronous steps of a parameter server, and clocks of workers, without ranks."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from mpicoll.communicator.spare_channels import SpareChannels
from mpicoll.parameter_server.control import NEVER
from mpicoll.parameter_server.synchronous_rounds import SynchronousRound


def test_a_dropped_worker_that_comes_back_is_read():
    steps = SynchronousRound(3, 0, 4, np.dtype(np.float32))
    assert list(steps.due([False] * 3, [True] * 3)) == []
    assert list(steps.due([False, False, True], [True] * 3)) == [2]
    steps.add(2, np.ones(4, np.float32), 0.1)
    assert steps.is_complete([True] * 3)


def test_workers_that_have_ended_count_as_far_as_they_have_given():
    steps, ended = SynchronousRound(4, 1, 4, np.dtype(np.float32)), [True] * 4
    for worker in steps.due([False, True, True, False], ended):
        steps.add(worker, np.ones(4, np.float32), 0.1)
    assert steps.given == 2
    assert not steps.is_complete([True, True, True, False])
    assert steps.is_complete(ended)
    steps.reset()
    for worker in steps.due(ended, ended):
        steps.add(worker, np.ones(4, np.float32), 0.1)
    assert steps.given == 3
    assert steps.is_complete([False] * 4)


def test_the_elements_that_gradients_were_given_for_are_known():
    steps = SynchronousRound(5, 0, 20, np.dtype(np.float32))
    assert steps.parts == [(0, 0)]
    for worker, (first, count) in enumerate([(12, 3), (0, 2), (5, 0), (1, 4), (15, 1)]):
        steps.add(worker, np.ones(count, np.float32), 0.1, first)
    assert steps.parts == [(0, 5), (12, 16)]
    assert steps.total.tolist() == [1, 2, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0]
    steps.reset()
    steps.add(0, np.ones(20, np.float32), 0.1)
    assert steps.parts == [(0, 20)]


def test_a_worker_may_be_retired_by_two_ranks_at_once():
    clock = np.zeros(1, np.int64)
    for _ in range(2):
        clock += NEVER
    assert clock[0] >= NEVER // 2


@pytest.mark.parametrize("order", [(5, 3, 9), (9, 5, 3)])
def test_spares_are_freed_in_one_order_on_all_ranks(order):
    freed, spares = [], SpareChannels()
    for session in order:
        channel = SimpleNamespace(size=1, session=session, close=partial(freed.append, session))
        spares.keep(session % 2, channel)
    spares.close(broken=False)
    assert freed == [3, 5, 9]
