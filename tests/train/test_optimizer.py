from itertools import pairwise

import numpy as np
import pytest

from mpicoll.train.models import Span
from mpicoll.train.optimizer import LocalMomentumSGD, MomentumSGD, learning_rate


def plain_step(p, v, g, rate, momentum, decay, decayed, nesterov):
    d = g.copy()
    d[:decayed] += decay * p[:decayed]
    v = momentum * v + d
    return p - rate * (d + momentum * v if nesterov else v), v


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-5), (np.float64, 1e-13)])
@pytest.mark.parametrize("decayed", [0, 7, 10])
def test_steps_match_plain_numpy(nesterov, momentum, dtype, tolerance, decayed):
    random = np.random.default_rng(0)
    p, v = random.standard_normal(10), np.zeros(10)
    found, spans = p.astype(dtype), [Span(0, decayed, True), Span(decayed, 10, False)]
    optimizer = MomentumSGD(found, momentum=momentum, nesterov=nesterov, weight_decay=0.1, spans=spans)
    for step in range(5):
        g = random.standard_normal(10)
        p, v = plain_step(p, v, g / 4, 0.05 * step, momentum, 0.1, decayed, nesterov)
        sent = g.astype(dtype)
        optimizer.step(sent, 0.05 * step, scale=1 / 4)
        np.testing.assert_array_equal(sent, g.astype(dtype))
    assert found.dtype == optimizer.velocity.dtype == dtype
    np.testing.assert_allclose(found, p, rtol=tolerance, atol=tolerance)


def course(schedule, total=100, warmup=10):
    return [learning_rate(step, total, 2.0, warmup, schedule) for step in range(total)]


@pytest.mark.parametrize("schedule", ["cosine", "constant", "step"])
def test_rate_rises_linearly_to_its_peak_and_never_again(schedule):
    rates = course(schedule)
    np.testing.assert_allclose(rates[:10], np.arange(1, 11) * 0.2)
    assert max(rates) == 2.0
    assert all(later <= earlier for earlier, later in pairwise(rates[9:]))


def test_cosine_ends_near_zero_and_is_half_way_in_the_middle():
    rates = course("cosine")
    assert rates[55] == pytest.approx(1.0)
    assert 0 < rates[-1] < 0.01


def test_step_falls_to_a_tenth_twice():
    rates = course("step")
    assert rates[49] == 2.0
    assert rates[50] == pytest.approx(0.2)
    assert rates[74] == pytest.approx(0.2)
    assert rates[75] == pytest.approx(0.02)


@pytest.mark.parametrize("schedule", ["cosine", "constant", "step"])
def test_run_shorter_than_its_warmup(schedule):
    assert learning_rate(0, 1, 1.0, 5, schedule) == pytest.approx(0.2)
    assert learning_rate(0, 1, 1.0, 0, schedule) > 0


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_of_each_rank_adds_up_to_momentum_of_the_sum(nesterov):
    random = np.random.default_rng(0)
    start = random.standard_normal(20)
    settings = {
        "momentum": 0.9,
        "nesterov": nesterov,
        "weight_decay": 0.01,
        "spans": [Span(0, 15, True), Span(15, 20, False)],
    }
    wanted, found = start.copy(), start.copy()
    plain = MomentumSGD(wanted, **settings)
    ranks = [LocalMomentumSGD(found, **settings) for _ in range(3)]
    for step in range(10):
        gradients = random.standard_normal((3, 20))
        plain.step(gradients.sum(0), 0.1 / (step + 1), 0.5)
        for rank, gradient in zip(ranks, gradients, strict=True):
            rank.local(gradient, 0.5)
        total = gradients.sum(0)
        ranks[0].step(total, 0.1 / (step + 1))
    np.testing.assert_allclose(found, wanted, rtol=1e-12)
