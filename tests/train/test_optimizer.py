from itertools import pairwise

import numpy as np
import pytest

from mpicoll.optim.learning_rate import learning_rate
from mpicoll.optim.local_momentum import LocalMomentum
from mpicoll.optim.optimizers import OPTIMIZERS, Momentum
from mpicoll.optim.update_rule import ParameterSpan


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
    found, spans = p.astype(dtype), [ParameterSpan(0, decayed, True), ParameterSpan(decayed, 10, False)]
    settings = {"momentum": momentum, "nesterov": float(nesterov)}
    optimizer = Momentum(found, settings, weight_decay=0.1, spans=spans)
    for step in range(5):
        g = random.standard_normal(10)
        p, v = plain_step(p, v, g / 4, 0.05 * step, momentum, 0.1, decayed, nesterov)
        sent = g.astype(dtype)
        optimizer.apply(sent, 0.05 * step, scale=1 / 4)
        np.testing.assert_array_equal(sent, g.astype(dtype))
    assert found.dtype == optimizer.state["velocity"].dtype == dtype
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
        "spans": [ParameterSpan(0, 15, True), ParameterSpan(15, 20, False)],
    }
    wanted, found = start.copy(), start.copy()
    momentum = {"momentum": 0.9, "nesterov": float(nesterov)}
    plain = Momentum(wanted, momentum, weight_decay=0.01, spans=settings["spans"])
    ranks = [LocalMomentum(found, **settings) for _ in range(3)]
    for step in range(10):
        gradients = random.standard_normal((3, 20))
        plain.apply(gradients.sum(0), 0.1 / (step + 1), scale=0.5)
        for rank, gradient in zip(ranks, gradients, strict=True):
            rank.local(gradient, 0.5)
        total = gradients.sum(0)
        ranks[0].step(total, 0.1 / (step + 1))
    np.testing.assert_allclose(found, wanted, rtol=1e-12)


def plain_rule(name, p, g, state, step, rate, decay):
    """One step of each rule in NumPy, as its paper has it; `decay` of each element."""
    if name == "adamw":
        p = p - rate * decay * p
    else:
        g = g + decay * p
    if name == "sgd":
        return p - rate * g
    if name == "adagrad":
        state["total"] = state.get("total", 0) + g**2
        return p - rate * g / (np.sqrt(state["total"]) + 1e-10)
    state["mean"] = 0.9 * state.get("mean", 0) + 0.1 * g
    state["square"] = 0.999 * state.get("square", 0) + 0.001 * g**2
    mean, square = state["mean"] / (1 - 0.9**step), state["square"] / (1 - 0.999**step)
    return p - rate * mean / (np.sqrt(square) + 1e-8)


@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam", "adamw"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-4), (np.float64, 1e-12)])
def test_every_rule_matches_plain_numpy_with_decay_of_some_elements(name, dtype, tolerance):
    random = np.random.default_rng(1)
    p, state = random.standard_normal(30), {}
    found = p.astype(dtype)
    spans = [ParameterSpan(0, 12, True), ParameterSpan(12, 17, False), ParameterSpan(17, 30, True)]
    optimizer = OPTIMIZERS[name](found, weight_decay=0.05, spans=spans)
    decay = np.where((np.arange(30) < 12) | (np.arange(30) >= 17), 0.05, 0.0)
    for step in range(1, 8):
        g = random.standard_normal(30)
        p = plain_rule(name, p, g / 3, state, step, 0.02, decay)
        optimizer.apply(g.astype(dtype), 0.02, scale=1 / 3)
    assert optimizer.steps == 7
    np.testing.assert_allclose(found, p, rtol=tolerance, atol=tolerance)


def norms_rule(name, p, g, state, step, rate, decay):
    """One step of LARS or LAMB for one array in NumPy, as their papers have it; without decay, without trust ratio."""
    if name == "lars":
        ratio = 0.001 * np.linalg.norm(p) / (np.linalg.norm(g) + decay * np.linalg.norm(p)) if decay else 1.0
        state["velocity"] = 0.9 * state.get("velocity", 0) + rate * ratio * (g + decay * p)
        return p - state["velocity"]
    state["mean"] = 0.9 * state.get("mean", 0) + 0.1 * g
    state["square"] = 0.999 * state.get("square", 0) + 0.001 * g**2
    direction = state["mean"] / (1 - 0.9**step) / (np.sqrt(state["square"] / (1 - 0.999**step)) + 1e-6) + decay * p
    ratio = np.linalg.norm(p) / np.linalg.norm(direction) if decay else 1.0
    return p - rate * ratio * direction


@pytest.mark.parametrize("name", ["lars", "lamb"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-4), (np.float64, 1e-11)])
def test_rules_with_norms_match_plain_numpy_for_each_array(name, dtype, tolerance):
    random = np.random.default_rng(3)
    whole, states = random.standard_normal(40), [{}, {}, {}]
    found = whole.astype(dtype)
    spans = [ParameterSpan(0, 20, True), ParameterSpan(20, 25, False), ParameterSpan(25, 40, True)]
    optimizer = OPTIMIZERS[name](found, weight_decay=0.05, spans=spans)
    for step in range(1, 8):
        g = random.standard_normal(40) * 10.0 ** random.integers(-2, 3)
        for state, (start, stop, decays) in zip(states, spans, strict=True):
            part, decay = slice(start, stop), 0.05 if decays else 0.0
            whole[part] = norms_rule(name, whole[part], g[part] / 3, state, step, 0.2 / step, decay)
        optimizer.apply(g.astype(dtype), 0.2 / step, scale=1 / 3)
    np.testing.assert_allclose(found, whole, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_rules_with_norms_of_zero_vectors_and_of_parts(name):
    p = np.zeros(6)
    optimizer = OPTIMIZERS[name](p, weight_decay=0.1)
    optimizer.apply(np.zeros(6), 0.5)
    assert not p.any()
    optimizer.apply(np.ones(6), 0.5)
    assert np.isfinite(p).all()
    assert p.all()
    for gradient, first in ((np.ones(4), 0), (np.ones(4), 2)):
        with pytest.raises(ValueError, match="norms need all 6"):
            optimizer.apply(gradient, 0.5, first)


def test_a_trust_ratio_is_that_of_each_array():
    """A larger gradient of one array changes neither its own step nor that of others, but for rounding."""
    random = np.random.default_rng(4)
    start, g = random.standard_normal(30), random.standard_normal(30)
    spans = [ParameterSpan(0, 10, True), ParameterSpan(10, 30, True)]
    ends = []
    for factor in (1.0, 1000.0):
        p = start.copy()
        optimizer = OPTIMIZERS["lars"](p, spans=spans)
        optimizer.apply(np.concatenate([factor * g[:10], g[10:]]), 1.0)
        ends.append(p)
    np.testing.assert_allclose(*ends, rtol=1e-12)
    assert not np.allclose(ends[0], start, rtol=1e-6)


@pytest.mark.parametrize("name", [name for name, kind in OPTIMIZERS.items() if not kind.layerwise])
def test_a_vector_in_parts_takes_the_same_bits(name):
    """Shards update a chunk each, by one rule."""
    random = np.random.default_rng(2)
    start = random.standard_normal(40).astype(np.float32)
    spans = [ParameterSpan(0, 25, True), ParameterSpan(25, 40, False)]
    whole, parts = start.copy(), start.copy()
    optimizer = OPTIMIZERS[name](whole, weight_decay=0.1, spans=spans)
    cuts = [(0, 20), (20, 40)]
    inside = [[(max(a, x), min(b, y), d) for x, y, d in spans if max(a, x) < min(b, y)] for a, b in cuts]
    chunks = [
        OPTIMIZERS[name](parts[a:b], weight_decay=0.1, spans=[ParameterSpan(x - a, y - a, d) for x, y, d in spans_of])
        for (a, b), spans_of in zip(cuts, inside, strict=True)
    ]
    for _ in range(5):
        g = random.standard_normal(40).astype(np.float32)
        optimizer.apply(g, 0.1, scale=0.5)
        for (a, b), chunk in zip(cuts, chunks, strict=True):
            chunk.apply(g[a:b], 0.1, scale=0.5)
    assert np.array_equal(whole, parts)


def test_a_part_of_the_elements_leaves_the_others_alone():
    p = np.ones(10)
    optimizer = OPTIMIZERS["adam"](p)
    optimizer.apply(np.ones(4), 0.1, first=3)
    assert (p[:3] == 1).all() and (p[7:] == 1).all() and (p[3:7] < 1).all()  # noqa: PT018
    assert not optimizer.state["mean"][:3].any()
