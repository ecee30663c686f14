"""Sessions of compressors whose payloads are added, with ranks that are played one after the other."""

from __future__ import annotations

import numpy as np
import pytest

from mpicoll.compression import Key, Summed, compressor, names
from mpicoll.compression.common import Common
from mpicoll.compression.summed import Memory, Session
from mpicoll.errors import CorruptPayload
from mpicoll.kernels.reduce import reducer

SPECS = [name for name in names() if isinstance(compressor(name), Summed)]


def summed(codec: Summed, xs: np.ndarray, memories: list[Memory] | None = None, step: int = 0) -> list[np.ndarray]:
    """Return the result on rank 0, then what each rank contributed."""
    size, count = xs.shape
    rounds = codec.rounds(count, size)
    rooms = [[np.full(each.count, 77, each.carrier) for each in rounds] for _ in xs]
    sessions: list[Session] = [codec.session(count, size, room) for room in rooms]
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
        codec = Common(bits)
        for size in sizes:
            result, *_ = summed(codec, np.full((size, 600), -2.5, np.float32))
            np.testing.assert_allclose(result, -2.5 * size, rtol=1e-6)


@pytest.mark.parametrize(("bits", "most"), [(8, 127), (16, 32767)])
def test_too_many_ranks_are_refused(bits: int, most: int) -> None:
    Common(bits).rounds(100, most)
    with pytest.raises(ValueError, match=f"at most {most} ranks without overflow, not on {most + 1}"):
        Common(bits).rounds(100, most + 1)


@pytest.mark.parametrize("bits", [8, 16])
def test_blocks_too_small_for_a_scale_arrive_as_zeros(bits: int) -> None:
    levels = Common(bits).levels(2)
    for factor, wanted in ((0.99, 0.0), (1.01, 1.0)):
        x = np.full((2, 100), factor * levels * 2.0**-126, np.float32)
        result, *_ = summed(Common(bits), x)
        np.testing.assert_allclose(result, wanted * 2 * x[0], rtol=1e-5)


def test_nan_beside_inf_beside_numbers() -> None:
    x = vectors(3, 1536)
    x[0, 3], x[1, 3], x[2, 600] = np.nan, np.inf, -np.inf
    result, *owns = summed(Common(), x)
    assert np.isnan(result[:1024]).all()
    assert np.isfinite(result[1024:]).all()
    assert all(np.isnan(own[:1024]).all() for own in owns)


def test_damaged_maxima_are_refused() -> None:
    codec, x = Common(), vectors(1, 600)[0]
    payload = np.empty(codec.wire_nbytes(x.size), np.uint8)
    codec.compress(x, payload, Key())
    payload[:4].view(np.uint32)[0] = 0x7F800001
    with pytest.raises(CorruptPayload, match="a maximum is not a finite number"):
        codec.decompress(payload, x)
