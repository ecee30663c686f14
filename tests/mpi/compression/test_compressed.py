"""Compressed allreduce: equal bits everywhere, errors within what the compressor says, in every form of the call."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll import Intracomm
from mpicoll.collectives import select, two_shot
from mpicoll.compression import Key, Sparsifier, compressor, names
from mpicoll.compression.bounded import ErrorBounded
from mpicoll.compression.integers import QuantizedIntegers
from mpicoll.errors import CommunicatorBroken, CorruptPayload, MismatchError, MpicollError
from mpicoll.kernels.codecs import fp8_codec, sign_codec
from mpicoll.kernels.codecs.codec_kernels import Codec
from tests.mpi import call_forms
from tests.mpi.conftest import TIMEOUT, WORLD

pytestmark = pytest.mark.mpi
COUNTS = (1, 5, 513, 4096, 70_001)
SPARSE = {name for name in names() if isinstance(compressor(name), Sparsifier)}
DENSE = [name for name in names() if name not in SPARSE]


def given(rank: int, count: int) -> np.ndarray:
    return np.random.default_rng([rank, count]).standard_normal(count).astype(np.float32)


def same_everywhere(comm: Intracomm, result: np.ndarray) -> bool:
    ends = [np.empty_like(result.view(np.uint32)) for _ in range(2)]
    plain = MPI.Intracomm(comm)
    plain.Allreduce(result.view(np.uint32), ends[0], MPI.MIN)
    plain.Allreduce(result.view(np.uint32), ends[1], MPI.MAX)
    return bool((ends[0] == ends[1]).all())


def decoded(spec: str, x: np.ndarray) -> np.ndarray:
    codec, out = compressor(spec), np.empty_like(x)
    payload = np.empty(codec.wire_nbytes(x.size), np.uint8)
    codec.decompress(payload[: codec.compress(x, payload, Key())], out)
    return out


@pytest.mark.parametrize("spec", [*DENSE, "int8:block=32", "int4:rounding=stochastic"])
def test_ranks_hold_equal_bits(comm: Intracomm, spec: str) -> None:
    for count in COUNTS:
        exact = sum(given(rank, count).astype(np.float64) for rank in range(comm.size))
        x, y = given(comm.rank, count), np.zeros(count, np.float32)
        comm.Allreduce(x, y, compression=spec)
        assert same_everywhere(comm, y)
        assert (x == given(comm.rank, count)).all()
        comm.Allreduce(MPI.IN_PLACE, x, compression=spec)
        assert same_everywhere(comm, x)
        if spec.startswith(("fp16", "bf16", "int8")):
            for result in (x, y):
                assert np.abs(result - exact).max() < 0.1 * max(1.0, float(np.abs(exact).max()))


def test_the_error_is_that_of_two_compressions(comm: Intracomm) -> None:
    count, spec = 512 * comm.size, "int8"
    vectors = [given(rank, count) for rank in range(comm.size)]
    y = np.zeros(count, np.float32)
    comm.Allreduce(vectors[comm.rank], y, compression=spec)
    sent = np.array([decoded(spec, x) for x in vectors])
    total = sent[0].copy()
    for other in sent[1:]:
        total += other
    np.testing.assert_array_equal(y, decoded(spec, total))


@pytest.mark.parametrize("bound", [1e-6, 1e-3, 0.5])
def test_an_absolute_bound_is_kept(comm: Intracomm, bound: float) -> None:
    for count in COUNTS:
        vectors = [given(rank, count) * np.float32(10.0 ** (rank % 3 - 1)) for rank in range(comm.size)]
        y = np.zeros(count, np.float32)
        comm.Allreduce(vectors[comm.rank], y, compression=f"error:{bound}")
        exact, most = sum(x.astype(np.float64) for x in vectors), sum(np.abs(x.astype(np.float64)) for x in vectors)
        assert (np.abs(y - exact) <= (comm.size + 1) * bound + comm.size * 2.0**-24 * most).all()
        assert same_everywhere(comm, y)


@pytest.mark.mpi(min_size=2)
def test_a_length_that_cannot_be_is_refused(comm: Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    written = two_shot.CompressedChunk.compress

    def too_long(self: two_shot.CompressedChunk, x: np.ndarray, key: Key) -> None:
        written(self, x, key)
        self.memory[:8].view(np.int64)[0] = 1 << 40

    x = np.ones(5000, np.float32)
    if comm.rank == 0:
        monkeypatch.setattr(two_shot.CompressedChunk, "outgoing", lambda self: self.memory)
        monkeypatch.setattr(two_shot.CompressedChunk, "compress", too_long)
        monkeypatch.setattr(two_shot.Encode, "instruction", lambda self: None)
    with pytest.raises(CorruptPayload, match="1099511627776"):
        comm.Allreduce(x, x.copy(), compression="error:1e-3")


def test_other_forms(comm: Intracomm) -> None:
    x, wanted, y = given(comm.rank, 5000), np.zeros(5000, np.float32), np.zeros(5000, np.float32)
    comm.Allreduce(x, wanted, compression="int8")
    requests = [comm.Iallreduce(x, y, compression="int8"), comm.Iallreduce(x.copy(), y.copy(), compression="fp16")]
    for request in reversed(requests):
        request.Wait()
    np.testing.assert_array_equal(y, wanted)
    plan = comm.Allreduce_init(x, y, compression="int8")
    for _ in range(3):
        y[:] = 0
        plan.Start()
        plan.Wait()
        np.testing.assert_array_equal(y, wanted)
    plan.Free()


def test_stochastic_rounding_differs_between_calls_and_ranks(comm: Intracomm) -> None:
    x = np.full(512 * comm.size, 0.3, np.float32)
    x[::512] = 1.0
    first, second = np.zeros_like(x), np.zeros_like(x)
    for result in (first, second):
        comm.Allreduce(x, result, compression="int4:rounding=stochastic")
    assert (first != second).any()
    codec = compressor("int4:rounding=stochastic")
    assert codec.unbiased


@pytest.mark.mpi(min_size=4)
def test_between_nodes_only(verdicts: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPICOLL_NODES", "2")
    plain = WORLD.Dup()
    comm = Intracomm(plain, timeout=TIMEOUT)
    for count in COUNTS:
        y = np.zeros(count, np.float32)
        comm.Allreduce(given(comm.rank, count), y, compression="int8")
        assert same_everywhere(comm, y)
        exact = sum(given(rank, count).astype(np.float64) for rank in range(comm.size))
        assert np.abs(y - exact).max() < 0.1 * max(1.0, float(np.abs(exact).max()))
        comm.Allreduce(given(comm.rank, count), y, compression="int8", algorithm=select.TWO_SHOT)
        assert same_everywhere(comm, y)
    plain.Free()


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"compression": "int9"}, ValueError),
        ({"compression": "int8", "op": MPI.MAX}, ValueError),
        ({"compression": "int8", "algorithm": "ring"}, ValueError),
        ({"compression": 8}, TypeError),
    ],
)
def test_wrong_settings_are_refused(comm: Intracomm, settings: dict[str, object], error: type[Exception]) -> None:
    x = np.ones(1000, np.float32)
    with pytest.raises(error):
        comm.Allreduce(x, x.copy(), **settings)
    with pytest.raises(TypeError, match="float64"):
        comm.Allreduce(np.ones(10), np.ones(10), compression="int8")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("form", call_forms.FORMS)
def test_damage_on_one_rank_ends_the_call_on_all(comm: Intracomm, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    codec = compressor("int8").codec
    assert codec is not None
    if comm.rank == comm.size - 1:  # its scales are no powers of two
        settings = np.concatenate([codec.settings, np.zeros(3, np.int64)])
        wrong = Codec(codec.encode, fp8_codec.decode, settings)
        monkeypatch.setattr(QuantizedIntegers, "codec", property(lambda _: wrong))
    x = np.ones(5000, np.float32)
    with pytest.raises(CorruptPayload, match="a scale is not a finite number"):
        call_forms.make(comm, form, "allreduce", x, x.copy(), compression="int8")
    with pytest.raises(CommunicatorBroken):
        comm.Allreduce(x, x.copy())


@pytest.mark.mpi(min_size=2)
def test_a_wrong_payload_of_another_rank_ends_the_call_on_all(comm: Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    codec = compressor("error:1e-3").codec
    assert codec is not None
    if comm.rank == comm.size - 1:
        wrong = Codec(sign_codec.encode, codec.decode, codec.settings)
        monkeypatch.setattr(ErrorBounded, "codec", property(lambda _: wrong))
    x = np.ones(5000, np.float32)
    with pytest.raises(CorruptPayload, match="its blocks do not fit its length"):
        comm.Allreduce(x, x.copy(), compression="error:1e-3")


@pytest.mark.mpi(min_size=2)
def test_ranks_that_compress_otherwise_disagree(comm: Intracomm) -> None:
    spec = "int4" if comm.rank == 1 else "int8"
    with pytest.raises(MpicollError) as caught:
        comm.Allreduce(np.ones(5000, np.float32), np.ones(5000, np.float32), compression=spec)
    assert isinstance(caught.value, MismatchError) or "int" in str(caught.value)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("spec", ["int8", "randomk:0.1", "powersgd:1", "topk:0.1"])
def test_a_rank_without_elements_is_found(comm: Intracomm, spec: str) -> None:
    """It exchanges empty messages, and so meets the others."""
    x = np.ones(0 if comm.rank == 1 else 1000, np.float32)
    with pytest.raises(MismatchError, match=r"rank 1 called Allreduce.*count=0"):
        comm.Allreduce(x, x.copy(), compression=spec)
