"""What is particular to sparsifiers: which elements, with what probability, and what damage is seen."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize

from mpicoll.compression import Key, Sparsifier, compressor, names
from mpicoll.compression.randomized import RandomK, Wangni
from mpicoll.errors import CorruptPayload
from mpicoll.kernels.codecs import sampling
from tests.compression.test_contract import decode, encode
from tests.kernels.test_topk import oracle

SPECS = [name for name in names() if isinstance(compressor(name), Sparsifier)]


def made(spec: str) -> Sparsifier:
    codec = compressor(spec)
    assert isinstance(codec, Sparsifier)
    return codec


def normal(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, count]).standard_normal(count).astype(np.float32)


def entries(codec: Sparsifier, x: np.ndarray, key: Key = Key()) -> tuple[np.ndarray, np.ndarray]:  # noqa: B008
    indices, values = np.empty(codec.capacity(x.size), np.uint32), np.empty(codec.capacity(x.size), np.float32)
    number = codec.select(x, key, indices, values)
    return indices[:number], values[:number]


def test_there_are_sparsifiers() -> None:
    assert set(SPECS) == {"topk", "oktopk", "sampled", "randomk", "wangni"}


@pytest.mark.parametrize(("spec", "k"), [("topk", 500), ("topk:0.07", 3500), ("topk:k=3", 3), ("topk:1", 50_000)])
def test_topk_sends_the_largest(spec: str, k: int) -> None:
    x = normal(50_000)
    indices, values = entries(made(spec), x)
    np.testing.assert_array_equal(indices, oracle(x, k))
    np.testing.assert_array_equal(values, x[indices])


@pytest.mark.parametrize("spec", SPECS)
def test_what_is_selected_arrives(spec: str) -> None:
    codec, x = made(spec), normal(3000)
    indices, values = entries(codec, x, Key(1, 2, 3))
    assert (np.diff(indices.astype(np.int64)) > 0).all()
    wanted = np.zeros(3000, np.float32)
    wanted[indices] = values
    np.testing.assert_array_equal(decode(codec, encode(codec, x), 3000), wanted)
    assert codec.capacity(0) == 0
    assert encode(codec, x[:0]).size == 4


@pytest.mark.parametrize("spec", SPECS)
def test_more_elements_than_32_bits_can_number(spec: str) -> None:
    assert made(spec).capacity((1 << 32) - 1) > 0
    with pytest.raises(ValueError, match="4294967296 elements"):
        made(spec).capacity(1 << 32)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nothing_but_what_is_not_finite(spec: str, value: float) -> None:
    codec = made(spec)
    y = decode(codec, encode(codec, np.full(5000, value, np.float32)), 5000)
    assert 1 <= np.count_nonzero(~np.isfinite(y)) <= codec.capacity(5000)


def test_sampled_sends_about_as_many() -> None:
    random, codec = np.random.default_rng(1), made("sampled")
    exact = 0
    for count in (100, 5000, 100_000, 1_000_000):
        k = codec.capacity(count) * 3 // 4
        for x in (normal(count), np.exp(4 * normal(count)), random.integers(-3, 4, count).astype(np.float32)):
            for seed in range(5):
                indices, values = entries(codec, x, Key(seed))
                assert 2 / 3 * k - 1 <= indices.size <= 4 / 3 * k + 1
                np.testing.assert_array_equal(indices, oracle(x, indices.size))
                np.testing.assert_array_equal(values, x[indices])
                exact += indices.size == k
    assert exact < 45  # else it never took a sample


def test_a_sample_that_misleads_is_corrected() -> None:
    codec, x = made("sampled"), normal(200_000)
    sampled = np.empty(6400, np.uint32)
    sampling.positions(x.size, Key().words(), 0, sampled)
    for factor in (100, 0.01):
        bad = x.copy()
        bad[sampled] *= np.float32(factor)
        indices, _ = entries(codec, bad)
        assert 1333 <= indices.size <= 2666
        np.testing.assert_array_equal(indices, oracle(bad, indices.size))


def test_positions_are_the_same_on_every_rank() -> None:
    codec = made("randomk:0.05")
    assert isinstance(codec, RandomK)
    for count in (1, 19, 20, 21, 1000, 1_000_003):
        drawn = [codec.positions(count, Key(4, rank, 9)) for rank in range(3)]
        assert (drawn[0] == drawn[1]).all()
        assert (drawn[0] == drawn[2]).all()
        assert (np.diff(drawn[0].astype(np.int64)) > 0).all()
        assert drawn[0][-1] < count
        assert drawn[0].size == codec.capacity(count)
        np.testing.assert_array_equal(entries(codec, normal(count), Key(4, 1, 9))[0], drawn[0])
    assert (codec.positions(1000, Key(4, 0, 9)) != codec.positions(1000, Key(4, 0, 10))).any()


def test_every_position_is_as_likely_as_its_run_is_short() -> None:
    codec, count, times = made("randomk:k=7"), 40, 10_000
    assert isinstance(codec, RandomK)
    hits = np.zeros(count)
    for step in range(times):
        hits[codec.positions(count, Key(0, 0, step))] += 1
    cuts = [run * count // 7 for run in range(8)]
    chance = np.repeat(1 / np.diff(cuts), np.diff(cuts))
    assert (np.abs(hits - times * chance) < 4 * np.sqrt(times * chance * (1 - chance))).all()


@pytest.mark.parametrize("spec", ["randomk:k=2", "randomk:k=3", "wangni:0.4", "wangni:variance=1.5"])
def test_right_on_average(spec: str) -> None:
    codec, x = made(spec), np.array([3, -1, 0.5, 0.01, -20, 0, 1e-3, 2], np.float32)
    total, squares, times = np.zeros(8), np.zeros(8), 10_000
    for step in range(times):
        y = decode(codec, encode(codec, x, Key(1, 0, step)), 8).astype(np.float64)
        total += y
        squares += y * y
    error = np.sqrt(np.maximum(squares / times - (total / times) ** 2, 0) / times)
    assert (np.abs(total / times - x) <= 4 * error + 1e-6 * np.abs(x)).all()


def test_the_squared_error_of_randomk() -> None:
    codec, x = made("randomk:k=50"), normal(1000)
    errors = [float(((decode(codec, encode(codec, x, Key(0, 0, t)), 1000) - x) ** 2).sum()) for t in range(2000)]
    assert np.mean(errors) == pytest.approx(19 * float((x**2).sum()), abs=4 * float(np.std(errors)) / 2000**0.5)


def closed_form_rate(x: np.ndarray, density: float) -> float:
    """The rate that keeps so many on average: with the k largest certain, the smallest k that leaves none above 1."""
    falling = -np.sort(-np.abs(x.astype(np.float64)))
    tails = np.cumsum(falling[::-1])[::-1]
    for k in range(int(density * x.size)):
        rate = (density * x.size - k) / tails[k]
        if rate * falling[k] <= 1:
            return float(rate)
    raise AssertionError("no rate")


@pytest.mark.parametrize("density", [0.01, 0.1, 0.5])
@pytest.mark.parametrize("spread", [0.0, 1.0, 3.0])
def test_wangni_has_the_least_variance(density: float, spread: float) -> None:
    count = 10_000
    x = normal(count) * np.exp(np.float32(spread) * normal(count, 1))
    codec, wide = made(f"wangni:{density}"), x.astype(np.float64)
    rate, wanted = sampling.best_rate(x, density * count), closed_form_rate(x, density)
    chance, best = np.minimum(rate * np.abs(wide), 1), np.minimum(wanted * np.abs(wide), 1)
    assert chance.sum() <= density * count * (1 + 1e-9)
    ratio = (wide**2 / best).sum()
    assert (wide**2 / chance).sum() == pytest.approx(ratio, rel=0.01)
    sent = [entries(codec, x, Key(0, 0, step)) for step in range(200)]
    error = 4 * np.sqrt((best * (1 - best)).sum() / 200)
    assert np.mean([indices.size for indices, _ in sent]) == pytest.approx(best.sum(), abs=error + 0.01 * best.sum())
    squares = [(values.astype(np.float64) ** 2).sum() for _, values in sent]
    assert np.mean(squares) == pytest.approx(ratio, rel=0.01 + 4 * float(np.std(squares) / np.mean(squares)) / 200**0.5)


def spread_out(count: int, spread: float, seed: int = 0) -> np.ndarray:
    return normal(count, seed) * np.exp(np.float32(spread) * normal(count, seed + 1))


def probabilities(x: np.ndarray, variance: float) -> np.ndarray:
    codec = made(f"wangni:variance={variance}")
    assert isinstance(codec, Wangni)
    return np.minimum(codec.rate(x) * np.abs(x.astype(np.float64)), 1)


@pytest.mark.parametrize("variance", [1.01, 1.5, 4.0, 50.0])
@pytest.mark.parametrize("spread", [0.0, 1.0, 3.0])
def test_no_probabilities_of_this_variance_keep_fewer(variance: float, spread: float) -> None:
    """A solver of constrained problems finds none."""
    for seed in range(5):
        x = spread_out(9, spread, seed)
        wide = x.astype(np.float64)
        wide /= np.linalg.norm(wide)
        chance = probabilities(x, variance)
        assert (wide**2 / chance).sum() <= variance * (1 + 1e-9)
        moment = {"type": "ineq", "fun": lambda p, squares=wide**2: variance - (squares / p).sum()}
        bounds = [(1e-9, 1)] * wide.size
        start = np.full(wide.size, 1 / variance)
        options = {"maxiter": 1000, "ftol": 1e-12}
        found = minimize(np.sum, start, method="SLSQP", bounds=bounds, constraints=[moment], options=options)
        if found.success:
            assert chance.sum() <= found.fun * (1 + 1e-6)
        assert chance.sum() <= wide.size / variance * (1 + 1e-9)


def sorted_rate(x: np.ndarray, variance: float) -> float:
    """The closed form: the fewest certain elements, the largest, that leave no probability above 1."""
    falling = -np.sort(-np.abs(x.astype(np.float64)))
    sums, squares = (np.cumsum(each[::-1])[::-1] for each in (falling, falling**2))
    for k in range(x.size):
        rate = sums[k] / ((variance - 1) * squares[0] + squares[k])
        if rate * falling[k] <= 1:
            return float(rate)
    raise AssertionError("no rate")


@pytest.mark.parametrize("variance", [1.001, 1.5, 20.0])
@pytest.mark.parametrize("spread", [0.0, 1.0, 3.0, 8.0])
def test_the_rate_of_a_variance_is_that_of_the_closed_form(variance: float, spread: float) -> None:
    x = spread_out(20_000, spread)
    codec = made(f"wangni:variance={variance}")
    assert isinstance(codec, Wangni)
    assert codec.rate(x) == pytest.approx(sorted_rate(x, variance), rel=1e-9)


@pytest.mark.parametrize("variance", [1.5, 3.0])
@pytest.mark.parametrize("spread", [0.0, 1.5])
def test_the_second_moment_is_the_variance_that_was_given(variance: float, spread: float) -> None:
    x, codec = spread_out(20_000, spread), made(f"wangni:variance={variance}")
    wide, moments, numbers = x.astype(np.float64), [], []
    for step in range(200):
        indices, values = entries(codec, x, Key(3, 0, step))
        moments.append(float((values.astype(np.float64) ** 2).sum() / (wide**2).sum()))
        numbers.append(indices.size)
    assert np.mean(moments) == pytest.approx(variance, rel=0.02)
    assert np.mean(numbers) == pytest.approx(probabilities(x, variance).sum(), rel=0.02)
    assert max(numbers) <= codec.capacity(x.size) < x.size


def test_a_variance_for_vectors_with_nothing_or_too_much() -> None:
    codec = made("wangni:variance=2")
    assert entries(codec, np.zeros(500, np.float32))[0].size == 0
    single = np.zeros(500, np.float32)
    single[77] = -3e-42
    sent = [entries(codec, single, Key(0, 0, step)) for step in range(400)]
    drawn = [values.tolist() for indices, values in sent if indices.tolist() == [77]]
    assert 150 < len(drawn) < 250
    assert all(values == pytest.approx([-6e-42], rel=1e-3) for values in drawn)
    mixed = normal(500)
    mixed[:400] = np.inf
    assert entries(codec, mixed)[0].tolist() == list(range(400))  # half of the elements are the most on average


def test_wangni_sends_what_is_certain_as_it_is() -> None:
    x = np.zeros(1000, np.float32)
    x[[3, 500]] = 2, -1e-42
    indices, values = entries(made("wangni:0.01"), x)
    assert indices.tolist() == [3, 500]
    np.testing.assert_array_equal(values, x[[3, 500]])


def test_wangni_draws_again_if_too_many_come() -> None:
    """With room for the mean of about 500 only, half of all draws are too many, and are drawn with other keys."""
    codec, x, room, again = made("wangni:0.1"), normal(5000), 500, 0
    selector = codec.selector(x.size)
    assert selector is not None
    for step in range(50):
        words, out = Key(0, 0, step).words(), np.zeros(8 * room, np.uint8)
        indices, values = np.empty(room, np.uint32), np.empty(room, np.float32)
        first = sampling.keep(x, sampling.best_rate(x, 500.0), words, 0, indices, values)
        number = int(selector.select(x, out, selector.settings, words, 0)) // 4
        assert 300 < number <= room
        found, kept = out[: 4 * number].view(np.uint32), out[4 * room :][: 4 * number].view(np.float32)
        assert (np.diff(found.astype(np.int64)) > 0).all()
        assert (np.abs(kept) >= np.abs(x[found])).all()
        same = number == first and (found == indices[:number]).all()
        assert same == (first <= room)
        again += first > room
    assert 10 < again < 40


@pytest.mark.parametrize("spec", SPECS)
def test_damage_is_seen(spec: str) -> None:
    codec, x = made(spec), normal(2000)
    payload = encode(codec, x)
    k = int(payload.view(np.uint32)[0])
    random, guard = np.random.default_rng(0), np.zeros(2064, np.float32)
    for _ in range(500):
        damaged = payload.copy()
        place = int(random.integers(payload.size))
        damaged[place] ^= np.uint8(1 << random.integers(8))
        try:
            codec.decompress(damaged, guard[:2000])
            codec.decompress_add(damaged, guard[:2000])
        except CorruptPayload:
            continue
        assert place >= 8, "a header was damaged"
        assert place >= 8 + 2 * k or (np.diff(damaged[8 : 8 + 2 * k].view(np.uint16).astype(int)) > 0).all()
    assert (guard[2000:] == 0).all()
    for length in {*range(12), payload.size - 8, payload.size - 4, payload.size - 1}:
        with pytest.raises(CorruptPayload):
            codec.decompress(payload[:length].copy(), guard[:2000])
    if spec != "sampled":  # which may send a third more
        many = encode(made("topk:0.5"), x)
        with pytest.raises(CorruptPayload, match="counts or indices"):
            codec.decompress(many, guard[:2000])


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("topk:0", "density: 0"),
        ("topk:1.5", "density: 1.5"),
        ("sampled:nan", "density: nan"),
        ("wangni:-1", "density: -1"),
        ("wangni:variance=1", "variance: 1"),
        ("wangni:variance=-2", "variance: -2"),
        ("wangni:variance=nan", "variance: nan"),
        ("wangni:variance=inf", "variance: inf"),
        ("wangni:0.5:variance=2", "density: 0.5 and variance=2"),
        ("topk:k=-1", "k: -1"),
        ("randomk:k=-1", "k: -1"),
        ("randomk:scale=2", "scale: 2"),
    ],
)
def test_wrong_settings(spec: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        compressor(spec)
