"""Compressors whose payloads are added: equal bits by every algorithm, errors within what they say, in every form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicoll.compression.shared_scale
from mpicoll import ErrorFeedback, GradientSynchronizer, Intracomm
from mpicoll.collectives import select
from mpicoll.collectives.composite import CompositePlan
from mpicoll.communicator.random_choices import begin_anew
from mpicoll.compression import Aggregatable, compressor, names
from mpicoll.compression.powersgd import PowerSGD
from mpicoll.compression.randomized import RandomK
from mpicoll.schedules import ALGORITHMS
from tests.mpi.compression.test_compressed import given, same_everywhere
from tests.mpi.conftest import TIMEOUT, WORLD

pytestmark = pytest.mark.mpi
COUNTS = (1, 2, 31, 513, 5000, 70_001)
SPECS = [name for name in names() if isinstance(compressor(name), Aggregatable)]
SPECS += ["powersgd:2:rows=50", "randomk:0.3:scale=0", "common:16:block=100:rounding=stochastic", "common:block=0"]


def reduce(comm: Intracomm, x: np.ndarray, **how: Any) -> np.ndarray:
    y = np.full(x.size, 7, np.float32)
    comm.Allreduce(x, y, **{"algorithm": "summed", **how})
    return y


def all_given(comm: Intracomm, count: int) -> np.ndarray:
    return np.array([given(rank, count) for rank in range(comm.size)], np.float64)


@pytest.mark.parametrize("spec", SPECS)
def test_ranks_hold_equal_bits_by_every_algorithm(comm: Intracomm, spec: str) -> None:
    for count in COUNTS:
        x = given(comm.rank, count)
        others = tuple(ALGORITHMS["allreduce"]) if count in (2, 5000) else ()
        for algorithm in ("summed", *others):
            assert same_everywhere(comm, reduce(comm, x, compression=spec, algorithm=algorithm))
        assert (x == given(comm.rank, count)).all()
        comm.Allreduce(MPI.IN_PLACE, x, compression=spec, algorithm="summed")
        assert same_everywhere(comm, x)


@pytest.mark.parametrize("spec", ["common", "common:16", "common:block=0", "common:block=64"])
def test_codes_add_up_exactly_in_any_order(subcomm: Intracomm, spec: str) -> None:
    size, rank = subcomm.size, subcomm.rank
    for count in (2, 5001):
        wanted = reduce(subcomm, given(rank, count), compression=spec)
        for algorithm in ALGORITHMS["allreduce"]:
            np.testing.assert_array_equal(
                reduce(subcomm, given(rank, count), compression=spec, algorithm=algorithm), wanted
            )
        order = np.random.default_rng(count).permutation(size)
        np.testing.assert_array_equal(reduce(subcomm, given(order[rank], count), compression=spec), wanted)


@pytest.mark.parametrize(("bits", "block"), [(8, 512), (8, 0), (16, 512), (16, 33)])
def test_the_sum_is_within_half_a_step_of_each_rank(subcomm: Intracomm, bits: int, block: int) -> None:
    for count in COUNTS:
        vectors = all_given(subcomm, count)
        length = block or count
        largest = np.abs(np.pad(vectors, ((0, 0), (0, -count % length)))).reshape(subcomm.size, -1, length).max((0, 2))
        steps = np.repeat(largest / ((2 ** (bits - 1) - 1) // subcomm.size), length)[:count]
        for rounding, most in (("nearest", 0.5), ("stochastic", 1.0)):
            spec = f"common:{bits}:block={block}:rounding={rounding}"
            error = np.abs(reduce(subcomm, given(subcomm.rank, count), compression=spec) - vectors.sum(0))
            assert (error <= subcomm.size * steps * most * 1.0001 + 1e-6).all()


def test_stochastic_codes_are_right_on_average_and_differ_between_ranks(comm: Intracomm) -> None:
    count, draws = 64, 400
    x = np.full(count, 0.3, np.float32)
    x[0] = 1.0
    spec = "common:block=64:rounding=stochastic"
    results = np.array([reduce(comm, x, compression=spec) for _ in range(draws)], np.float64)[:, 1:]
    step, size = 1 / (127 // comm.size), comm.size
    p = 0.3 / step % 1
    variance = size * p * (1 - p) * step**2
    assert abs(results.mean() - 0.3 * size) < 4 * np.sqrt(variance / results.size)
    # Ranks that drew the same would make it `size` times as large.
    assert 0.8 * variance < results.var() < 1.25 * variance


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("spec", ["common", "common:16"])
def test_what_is_not_finite_poisons_its_block_on_all_ranks(comm: Intracomm, spec: str, value: float) -> None:
    x = given(comm.rank, 2000)
    if comm.rank == comm.size - 1:
        x[600] = value
    y = reduce(comm, x, compression=spec)
    assert np.isnan(y[512:1024]).all()
    assert np.isfinite(y[:512]).all()
    assert np.isfinite(y[1024:]).all()


@pytest.mark.parametrize(("spec", "unit"), [("fp16", 2.0**-11), ("bf16", 2.0**-8)])
def test_halves_err_with_the_number_of_ranks_and_no_more(subcomm: Intracomm, spec: str, unit: float) -> None:
    for count in COUNTS:
        vectors = all_given(subcomm, count)
        bound = subcomm.size * unit * np.abs(vectors).sum(0) * 1.01 + 2.0**-24
        for algorithm in ("ring", "recursive_doubling"):
            y = reduce(subcomm, given(subcomm.rank, count), compression=spec, algorithm=algorithm)
            assert (np.abs(y - vectors.sum(0)) <= bound).all()


def test_halves_travel_as_halves(comm: Intracomm) -> None:
    x = given(comm.rank, 5000).astype(np.float16)
    wanted = np.empty_like(x)
    comm.Allreduce(x, wanted, algorithm="ring")
    y = reduce(comm, x.astype(np.float32), compression="fp16", algorithm="ring")
    np.testing.assert_array_equal(y, wanted.astype(np.float32))


@pytest.mark.parametrize("spec", ["randomk:0.1", "randomk:0.1:scale=0", "randomk:k=50"])
def test_the_same_elements_are_drawn_everywhere_and_others_each_time(subcomm: Intracomm, spec: str) -> None:
    count, drawn = 5000, []
    exact, codec = all_given(subcomm, count).sum(0), compressor(spec)
    assert isinstance(codec, RandomK)
    k = codec.capacity(count)
    for _ in range(3):
        y = reduce(subcomm, given(subcomm.rank, count), compression=spec)
        where = np.flatnonzero(y)
        assert where.size == k
        factor = count // k if codec.scale else 1
        np.testing.assert_allclose(y[where], factor * exact[where], rtol=1e-4, atol=1e-4 * factor)
        drawn.append(where)
    assert (drawn[0] != drawn[1]).any()
    assert (drawn[1] != drawn[2]).any()


def forms(comm: Intracomm, compression: Any) -> dict[str, Callable[[np.ndarray, np.ndarray], None]]:
    how = {"compression": compression, "algorithm": "summed"}

    def nonblocking(x: np.ndarray, y: np.ndarray) -> None:
        requests = [comm.Iallreduce(x, y, **how), comm.Iallreduce(x.copy(), y.copy(), compression="common:16")]
        for request in reversed(requests):
            request.Wait()

    def persistent(x: np.ndarray, y: np.ndarray) -> None:
        plan = comm.Allreduce_init(x, y, **how)
        for _ in range(1 if isinstance(compression, ErrorFeedback) else 3):
            y[:] = 0
            plan.Start()
            plan.Wait()
        plan.Free()

    def in_place(x: np.ndarray, y: np.ndarray) -> None:
        y[:] = x
        comm.Allreduce(MPI.IN_PLACE, y, **how)

    return {"nonblocking": nonblocking, "persistent": persistent, "in place": in_place}


@pytest.mark.parametrize("form", ["nonblocking", "persistent", "in place"])
@pytest.mark.parametrize("spec", ["randomk:0.1:scale=0", "powersgd"])
def test_random_choices_are_the_same_everywhere_in_every_form(comm: Intracomm, spec: str, form: str) -> None:
    feedback = ErrorFeedback(spec)
    for count in (100, 5001):
        x, y = given(comm.rank, count), np.zeros(count, np.float32)
        feedback.reset()
        for compression in (spec, feedback, feedback):
            forms(comm, compression)[form](x, y)
            assert same_everywhere(comm, y)
            assert y.any()


@pytest.mark.parametrize("form", ["nonblocking", "persistent", "in place"])
@pytest.mark.parametrize("spec", ["common", "fp16"])
def test_every_form_does_the_same(comm: Intracomm, spec: str, form: str) -> None:
    for count in (1, 100, 5001):
        x, y = given(comm.rank, count), np.zeros(count, np.float32)
        first, second = ErrorFeedback(spec), ErrorFeedback(spec)
        forms(comm, spec)[form](x, y)
        np.testing.assert_array_equal(y, reduce(comm, x, compression=spec))
        for _ in range(3):
            forms(comm, first)[form](x, y)
            np.testing.assert_array_equal(y, reduce(comm, x, compression=second))
        np.testing.assert_array_equal(first.residual, second.residual)


# Halves round what they add; the errors of unbiased compressors must not be fed back.
@pytest.mark.parametrize(
    "spec", [name for name in SPECS if name not in ("fp16", "bf16") and not compressor(name).unbiased]
)
def test_feedback_keeps_what_the_others_did_not_see(comm: Intracomm, spec: str) -> None:
    count, feedback = 5000, ErrorFeedback(spec)
    exact, got = np.zeros(count), np.zeros(count)
    for step in range(6):
        x = given(comm.rank + 10 * step, count)
        y = reduce(comm, x, compression=feedback)
        total = np.zeros(count, np.float64)
        MPI.Intracomm(comm).Allreduce(x.astype(np.float64), total)
        exact, got = exact + total, got + y
    assert feedback.residual is not None
    owed = np.zeros(count, np.float64)
    MPI.Intracomm(comm).Allreduce(feedback.residual.astype(np.float64), owed)
    np.testing.assert_allclose(got + owed, exact, atol=1e-3)
    assert (owed != 0).any()


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("spec", SPECS)
def test_between_nodes_only(verdicts: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, spec: str) -> None:
    monkeypatch.setenv("MPICOLL_NODES", "2")
    plain = WORLD.Dup()
    comm = Intracomm(plain, timeout=TIMEOUT)
    for count in (1, 5000, 700_001):
        y = reduce(comm, given(comm.rank, count), compression=spec, algorithm="hierarchy")
        assert same_everywhere(comm, y)
        if spec.startswith("common"):
            exact = all_given(comm, count).sum(0)
            # Two nodes share 127 levels; all |x| of a node together are below 5 standard deviations of each rank.
            assert np.abs(y - exact).max() < 2 * 5 * comm.size / (127 // 2)
        y = reduce(comm, given(comm.rank, count), compression=spec, algorithm="ring")
        assert same_everywhere(comm, y)
    plain.Free()


@pytest.mark.parametrize(
    ("spec", "algorithm", "says"),
    [
        ("int8", "ring", "'ring' does not compress with 'int8'; choose hierarchy or two_shot"),
        ("int8", "summed", "'summed' does not compress"),
        ("common", "two_shot", "'two_shot' does not compress with 'common'; choose hierarchy or summed, "),
        ("fp16", "mine", "'mine' does not compress"),
        ("common:7", None, "bits: 7"),
        ("common:block=5", None, "block: 5"),
        ("common:rounding=up", None, "rounding: 'up'"),
    ],
)
def test_wrong_settings_are_refused(comm: Intracomm, spec: str, algorithm: str | None, says: str) -> None:
    x = np.ones(100, np.float32)
    with pytest.raises(ValueError, match=says):
        comm.Allreduce(x, x.copy(), compression=spec, algorithm=algorithm)


def test_too_many_ranks_are_refused(comm: Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(mpicoll.compression.shared_scale._LARGEST, 8, comm.size - 1)
    x = np.ones(100, np.float32)
    with pytest.raises(ValueError, match=f"at most {comm.size - 1} ranks without overflow, not on {comm.size}"):
        comm.Allreduce(x, x.copy(), compression="common")


def test_ranks_may_start_persistent_operations_in_any_order(comm: Intracomm) -> None:
    x = given(comm.rank, 3000)
    specs = ["randomk:0.1", "powersgd", "common:rounding=stochastic"]
    ends = [np.zeros_like(x) for _ in specs]
    how = {"algorithm": "summed"}
    plans = [comm.Allreduce_init(x, y, compression=spec, **how) for spec, y in zip(specs, ends, strict=True)]
    for _ in range(2):
        late = comm.rank % 2 == 0
        if late:
            between = reduce(comm, x, compression="randomk:0.1")
        for plan in plans[::-1] if late else plans:
            plan.Start()
        if not late:
            between = reduce(comm, x, compression="randomk:0.1")
        for plan in plans:
            plan.Wait()
        for y in (between, *ends):
            assert same_everywhere(comm, y)
            assert np.isfinite(y).all()
        # Ranks that drew different elements would find others than `k` of them.
        assert np.count_nonzero(ends[0]) == np.count_nonzero(between) == 300
        error = np.linalg.norm(ends[0][ends[0] != 0] / 10 - all_given(comm, 3000).sum(0)[ends[0] != 0])
        assert error < 1e-3
    for plan in plans:
        plan.Free()


def test_rounds_are_done_by_what_suits_their_length(comm: Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    original = CompositePlan.add_allreduce

    def noting(self: CompositePlan, x: np.ndarray, reducer: Any, algorithm: str, *rest: Any) -> None:
        taken.append(algorithm)
        original(self, x, reducer, algorithm, *rest)

    monkeypatch.setattr(CompositePlan, "add_allreduce", noting)
    count, means = 1 << 20, select.means_of(comm.channel).without_memory()
    x = given(comm.rank, count)
    reduce(comm, x, compression="common")
    assert taken == [select.choose("allreduce", nbytes, means) for nbytes in (count // 128, count)]
    reduce(comm, x, compression="common", algorithm="tree")
    assert taken[2:] == ["tree", "tree"]


def low_rank(comm: Intracomm, rows: int, columns: int, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Return this rank's matrix, and the sum of all, which has the given rank."""
    random = np.random.default_rng(rank)
    left, right = random.standard_normal((rows, rank)), random.standard_normal((rank, columns))
    parts = [left @ np.diag(np.random.default_rng(each).standard_normal(rank)) @ right for each in range(comm.size)]
    return parts[comm.rank].astype(np.float32), np.sum(parts, 0)


def test_sums_of_low_rank_arrive(subcomm: Intracomm) -> None:
    for rank, wanted in ((3, 3), (2, 4)):
        own, exact = low_rank(subcomm, 40, 70, rank)
        y = reduce(subcomm, own.reshape(-1), compression=PowerSGD(wanted, shapes=((40, 70),)))
        np.testing.assert_allclose(y.reshape(40, 70), exact, atol=1e-5 * np.abs(exact).max() * subcomm.size)
        assert same_everywhere(subcomm, y)


def test_feedback_sends_a_fixed_vector_in_full_after_some_steps(comm: Intracomm) -> None:
    count, feedback = 3000, ErrorFeedback(PowerSGD(8))
    x, exact = given(comm.rank, count), all_given(comm, count).sum(0)
    got, errors = np.zeros(count), []
    for step in range(1, 61):
        got += reduce(comm, x, compression=feedback)
        errors.append(np.linalg.norm(got / step - exact) / np.linalg.norm(exact))
    assert errors[-1] < 0.15 < errors[0]


def test_parameters_of_all_shapes(comm: Intracomm) -> None:
    shapes = ((40, 30), (30,), (8, 4, 3, 3), (5, 2), ())
    codec, count = PowerSGD(2, shapes=shapes), 1200 + 30 + 288 + 10 + 1 + 3
    x, exact = given(comm.rank, count), all_given(comm, count).sum(0)
    y = reduce(comm, x, compression=codec)
    assert same_everywhere(comm, y)
    np.testing.assert_allclose(y[1200:1230], exact[1200:1230], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(y[1518:], exact[1518:], rtol=1e-5, atol=1e-5)
    for start, rows, columns in ((0, 40, 30), (1230, 8, 36)):
        assert np.linalg.matrix_rank(y[start : start + rows * columns].reshape(rows, columns), tol=1e-3) == 2


def test_gradients_are_seen_by_their_shapes_and_go_on_from_a_checkpoint(comm: Intracomm) -> None:
    shapes = [(60, 50), (7,), (40, 20, 2)]
    first, second = (
        GradientSynchronizer(shapes, comm=comm, compression="powersgd:2", bucket_bytes=10_000, dense_bytes=100)
        for _ in range(2)
    )
    for step in range(3):
        for sync in (first, second):
            for number, gradient in enumerate(sync.gradients):
                gradient[...] = given(comm.rank + 10 * step + number, gradient.size).reshape(gradient.shape)
        if step == 2:
            second.load(first.state())
        first.synchronize()
        # The first matrix is cut after 50 rows: a part of rank 2, and the rest.
        assert np.linalg.matrix_rank(first.gradients[0][:50], tol=1e-4) == 2
        assert same_everywhere(comm, first.flat)
    second.synchronize()
    np.testing.assert_array_equal(first.flat, second.flat)


def test_shapes_of_another_vector_are_refused(comm: Intracomm) -> None:
    x = np.ones(100, np.float32)
    with pytest.raises(ValueError, match="shapes: they have 101 elements, but the vector has 100"):
        comm.Allreduce(x, x.copy(), compression=PowerSGD(shapes=((101, 1),)))


@pytest.mark.parametrize("spec", ["qsgd", "randomk:0.3", "wangni:0.3", "common:rounding=stochastic"])
def test_a_run_that_continues_repeats_no_choices(spec: str) -> None:
    def first(number: int) -> np.ndarray:
        plain, y = MPI.COMM_WORLD.Dup(), np.empty(5000, np.float32)
        own = Intracomm(plain, timeout=TIMEOUT)
        if number:
            begin_anew(own.channel, number)
        own.Allreduce(given(own.rank, y.size), y, compression=spec)
        assert same_everywhere(own, y)
        plain.Free()
        return y

    np.testing.assert_array_equal(first(0), first(0))
    np.testing.assert_array_equal(first(5), first(5))
    assert len({first(number).tobytes() for number in (0, 5, 6)}) == 3
