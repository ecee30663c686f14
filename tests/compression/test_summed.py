"""Sessions of compressors whose payloads are added, with ranks that are played one after the other."""

from __future__ import annotations

import numpy as np
import pytest

from mpicoll.compression import Aggregatable, Key, compressor, names
from mpicoll.compression.aggregatable import AggregationSession, Memory
from mpicoll.compression.powersgd import PowerSGD
from mpicoll.compression.shared_scale import SharedScaleIntegers
from mpicoll.errors import CorruptPayload
from mpicoll.kernels.codecs import thin_products
from mpicoll.kernels.reduce import reducer

SPECS = [name for name in names() if isinstance(compressor(name), Aggregatable)]


def summed(
    codec: Aggregatable, xs: np.ndarray, memories: list[Memory] | None = None, step: int = 0
) -> list[np.ndarray]:
    """Return the result on rank 0, then what each rank contributed."""
    size, count = xs.shape
    rounds = codec.rounds(count, size)
    rooms = [[np.full(each.count, 77, each.carrier) for each in rounds] for _ in xs]
    sessions: list[AggregationSession] = [codec.session(count, size, room) for room in rooms]
    owns = np.empty_like(xs)
    for rank, session in enumerate(sessions):
        session.begin(Key(0, rank, step), {} if memories is None else memories[rank])
    for number, each in enumerate(rounds):
        reduce = reducer(each.op, each.dtype)
        assert reduce is not None
        for session, x in zip(sessions, xs, strict=True):
            session.fill(number, x)
        if number == len(rounds) - 1:
            for session, own in zip(sessions, owns, strict=True):
                session.own(own)
        total = rooms[0][number].copy()
        for room in rooms[1:]:
            reduce(total, total, room[number])
        for room in rooms:
            room[number][:] = total
    results = np.empty_like(xs)
    for session, y in zip(sessions, results, strict=True):
        session.finish(y)
    assert all(np.array_equal(y, results[0], equal_nan=True) for y in results)
    return [results[0], *owns]


def vectors(size: int, count: int) -> np.ndarray:
    return np.random.default_rng([size, count]).standard_normal((size, count)).astype(np.float32)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("size", [1, 3, 8])
def test_contributions_add_up_to_the_result(spec: str, size: int) -> None:
    for count in (0, 1, 33, 5000):
        result, *owns = summed(compressor(spec), vectors(size, count))  # type: ignore[arg-type]
        total = np.sum(np.array(owns, np.float64), 0)
        np.testing.assert_allclose(result, total, rtol=0.02, atol=0.1 if "16" in spec else 1e-4)


def test_no_sum_of_codes_overflows() -> None:
    for bits, sizes in ((8, (1, 2, 3, 64, 127)), (16, (1, 8, 1000))):
        codec = SharedScaleIntegers(bits)
        for size in sizes:
            result, *_ = summed(codec, np.full((size, 600), -2.5, np.float32))
            np.testing.assert_allclose(result, -2.5 * size, rtol=1e-6)


@pytest.mark.parametrize(("bits", "most"), [(8, 127), (16, 32767)])
def test_too_many_ranks_are_refused(bits: int, most: int) -> None:
    SharedScaleIntegers(bits).rounds(100, most)
    with pytest.raises(ValueError, match=f"at most {most} ranks without overflow, not on {most + 1}"):
        SharedScaleIntegers(bits).rounds(100, most + 1)


@pytest.mark.parametrize("bits", [8, 16])
def test_blocks_too_small_for_a_scale_arrive_as_zeros(bits: int) -> None:
    levels = SharedScaleIntegers(bits).levels(2)
    for factor, wanted in ((0.99, 0.0), (1.01, 1.0)):
        x = np.full((2, 100), factor * levels * 2.0**-126, np.float32)
        result, *_ = summed(SharedScaleIntegers(bits), x)
        np.testing.assert_allclose(result, wanted * 2 * x[0], rtol=1e-5)


def test_nan_beside_inf_beside_numbers() -> None:
    x = vectors(3, 1536)
    x[0, 3], x[1, 3], x[2, 600] = np.nan, np.inf, -np.inf
    result, *owns = summed(SharedScaleIntegers(), x)
    assert np.isnan(result[:1024]).all()
    assert np.isfinite(result[1024:]).all()
    assert all(np.isnan(own[:1024]).all() for own in owns)


def test_damaged_maxima_are_refused() -> None:
    codec, x = SharedScaleIntegers(), vectors(1, 600)[0]
    payload = np.empty(codec.wire_nbytes(x.size), np.uint8)
    codec.compress(x, payload, Key())
    payload[:4].view(np.uint32)[0] = 0x7F800001
    with pytest.raises(CorruptPayload, match="a maximum is not a finite number"):
        codec.decompress(payload, x)


def test_columns_become_orthonormal_whatever_they_were() -> None:
    random = np.random.default_rng(1)
    for length in (3, 16, 33, 1000):
        columns = random.standard_normal((3, length)).astype(np.float32) * np.float32([[1e-30], [1e10], [1]])
        assert thin_products.orthonormalize(columns) == 0
        np.testing.assert_allclose(columns @ columns.T, np.eye(3), atol=3e-7)


def test_dependent_columns_become_zero_and_then_random() -> None:
    columns = np.random.default_rng(1).standard_normal((5, 40)).astype(np.float32)
    columns[1] = -3 * columns[0]
    columns[2] = 0
    assert thin_products.orthonormalize(columns) == 2
    assert (columns[[1, 2]] == 0).all()
    thin_products.fill_zero_columns(columns, Key(step=1).words(), 0)
    assert thin_products.orthonormalize(columns) == 0
    np.testing.assert_allclose(columns @ columns.T, np.eye(5), atol=3e-7)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_matrix_with_what_is_not_finite_arrives_as_nan(value: float) -> None:
    codec, memories = PowerSGD(2, shapes=((20, 30), (30, 20))), [{} for _ in range(3)]  # type: ignore[var-annotated]
    x = vectors(3, 1200)
    x[1, 77] = value
    result, *_ = summed(codec, x, memories)
    assert np.isnan(result[:600]).all()
    assert np.isfinite(result[600:]).all()
    x[1, 77] = 0  # it does not stay in the memory
    assert np.isfinite(summed(codec, x, memories, 1)[0]).all()


def test_a_start_from_the_last_sum_comes_closer_with_each_step() -> None:
    codec, memories, x = PowerSGD(2), [{} for _ in range(2)], vectors(2, 2500)  # type: ignore[var-annotated]
    total = x.sum(0)
    errors = [np.linalg.norm(summed(codec, x, memories, step)[0] - total) for step in range(30)]
    best = np.sqrt((np.linalg.svd(total.reshape(50, 50), compute_uv=False)[2:] ** 2).sum())
    assert errors[0] > 1.02 * best
    assert errors[-1] < 1.01 * best


def test_a_matrix_of_zeros_does_not_stop_the_iteration() -> None:
    codec, memories = PowerSGD(2), [{} for _ in range(2)]  # type: ignore[var-annotated]
    assert (summed(codec, np.zeros((2, 2500), np.float32), memories)[0] == 0).all()
    assert (summed(codec, vectors(2, 2500), memories, 1)[0] != 0).any()


def test_parts_of_shapes() -> None:
    codec = PowerSGD(shapes=((4, 5), (7,), (2, 3, 2), ()))
    assert codec.part(0, 40).shapes == ((4, 5), (7,), (2, 6), (1,))
    assert codec.part(7, 31).shapes == ((3,), (2, 5), (7,), (4,))
    assert codec.part(5, 12).shapes == ((1, 5), (2,))
    assert codec.part(40, 50).shapes == ((0,),)
    assert len(codec.part(40, 50).rounds(10, 2)) == 1
    assert PowerSGD().part(3, 4) == PowerSGD()
    assert PowerSGD(3).shaped([(4, 5)]) == PowerSGD(3, shapes=((4, 5),))
    assert PowerSGD(rows=2).shaped([(4, 5)]) == PowerSGD(rows=2)


def test_more_shapes_than_elements() -> None:
    with pytest.raises(ValueError, match="shapes: they have 21 elements, but the vector has 20"):
        PowerSGD(shapes=((3, 7),)).rounds(20, 2)
    with pytest.raises(ValueError, match="rows: 3"):
        PowerSGD(rows=3, shapes=((3, 7),))
