"""Allreduce of the largest elements: against a slow oracle, with equal bits everywhere, in every form of the call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll import ErrorFeedback, Intracomm
from mpicoll.collectives import ok_topk
from mpicoll.compression import Key, Sparsifier, compressor, names
from mpicoll.errors import CorruptPayload
from mpicoll.kernels.codecs import codec_kernels, error_bounded_codec, sparse_codec, sparse_encoding
from mpicoll.kernels.codecs.codec_kernels import Codec, settings_of
from tests.mpi.compression.test_compressed import given, same_everywhere
from tests.mpi.conftest import TIMEOUT, WORLD

pytestmark = pytest.mark.mpi
COUNTS = (1, 2, 7, 513, 70_001)
SPARSE = [name for name in names() if isinstance(compressor(name), Sparsifier)]


def largest(x: np.ndarray, k: int) -> np.ndarray:
    """Return `x` with all but its k largest elements zero; the first of equal ones count."""
    kept = np.lexsort((np.arange(x.size), -np.abs(x)))[:k]
    out = np.zeros_like(x)
    out[kept] = x[kept]
    return out


def added(vectors: list[np.ndarray]) -> np.ndarray:
    """Add them up as the collective does: in rank order, in float32."""
    total = vectors[0].copy()
    for other in vectors[1:]:
        total += other
    return total


@pytest.mark.parametrize("density", [0.5, 0.1, 0.01])
def test_top_k_equals_the_oracle(comm: Intracomm, density: float) -> None:
    for count in COUNTS:
        for whole_numbers in (False, True):
            vectors = [given(rank, count) for rank in range(comm.size)]
            if whole_numbers:  # many ties, and sums that cancel
                vectors = [np.rint(2 * x) for x in vectors]
            k = compressor(f"topk:{density}").capacity(count)  # type: ignore[attr-defined]
            y = np.full(count, np.nan, np.float32)
            comm.Allreduce(vectors[comm.rank], y, compression=f"topk:{density}")
            np.testing.assert_array_equal(y, added([largest(x, k) for x in vectors]))
            assert same_everywhere(comm, y)


@pytest.mark.parametrize("density", [0.5, 0.1, 0.01])
def test_ok_topk_equals_the_oracle(comm: Intracomm, density: float) -> None:
    for count in COUNTS:
        for whole_numbers in (False, True):
            vectors = [given(rank, count) for rank in range(comm.size)]
            if whole_numbers:
                vectors = [np.rint(2 * x) for x in vectors]
            k = compressor(f"oktopk:{density}").capacity(count)  # type: ignore[attr-defined]
            y = np.full(count, np.nan, np.float32)
            comm.Allreduce(vectors[comm.rank], y, compression=f"oktopk:{density}")
            np.testing.assert_array_equal(y, largest(added([largest(x, k) for x in vectors]), k))
            assert same_everywhere(comm, y)


@pytest.mark.parametrize("spec", [*SPARSE, "wangni:variance=1.5", "wangni:variance=20"])
def test_every_form_gives_the_same(comm: Intracomm, spec: str) -> None:
    x = given(comm.rank, 5000)
    kept = x.copy()
    deterministic = not compressor(spec).unbiased and "sampled" not in spec
    wanted, y = np.zeros_like(x), np.zeros_like(x)
    comm.Allreduce(x, wanted, compression=spec)
    assert (x == kept).all()
    assert same_everywhere(comm, wanted)
    assert np.count_nonzero(wanted) > 0
    requests = [comm.Iallreduce(x, y, compression=spec), comm.Iallreduce(x.copy(), y.copy(), compression="fp16")]
    for request in reversed(requests):
        request.Wait()
    plan = comm.Allreduce_init(x, y, compression=spec)
    for _ in range(3):
        y[:] = np.nan
        plan.Start()
        plan.Wait()
        assert same_everywhere(comm, y)
        assert not deterministic or (y == wanted).all()
    plan.Free()
    comm.Allreduce(MPI.IN_PLACE, x, compression=spec)
    assert same_everywhere(comm, x)
    assert not deterministic or (x == wanted).all()


def test_what_is_full_goes_dense(comm: Intracomm) -> None:
    count = 100_000
    x, y = given(comm.rank, count), np.zeros(count, np.float32)
    comm.Allreduce(x, y, compression="topk:0.9")
    vectors = [given(rank, count) for rank in range(comm.size)]
    np.testing.assert_array_equal(y, added([largest(v, 90_000) for v in vectors]))
    assert sparse_encoding.wire_nbytes(90_000, count) == 4 + 4 * count


@pytest.mark.parametrize("spec", ["topk:0.1", "topk:0.01"])
def test_nothing_is_lost_with_error_feedback(comm: Intracomm, spec: str) -> None:
    feedback = ErrorFeedback(spec)
    x, y = given(comm.rank, 1003), np.zeros(1003, np.float32)
    before = np.zeros(1003, np.float32)
    for _ in range(5):
        comm.Allreduce(x, y, compression=feedback)
        compensated = before + x
        assert feedback.residual is not None
        k = feedback.compressor.capacity(x.size)  # type: ignore[attr-defined]
        sent = largest(compensated, k)
        np.testing.assert_array_equal(sent + feedback.residual, compensated)
        assert ((sent == 0) | (feedback.residual == 0)).all()
        before = feedback.residual.copy()


def all_vectors(comm: Intracomm, x: np.ndarray) -> list[np.ndarray]:
    table = np.empty((comm.size, x.size), np.float32)
    MPI.Intracomm(comm).Allgather(x, table)
    return list(table)


def test_ok_topk_keeps_what_the_result_lacks(comm: Intracomm) -> None:
    """Over 70 operations: exact ones equal the oracle, and what is sent and used leaves the residual, nothing else."""
    feedback, count = ErrorFeedback("oktopk:0.02"), 2000
    k = feedback.compressor.capacity(count)  # type: ignore[attr-defined]
    before, y, exact = np.zeros(count, np.float32), np.zeros(count, np.float32), 0
    for step in range(70):
        x = np.random.default_rng([comm.rank, step]).standard_normal(count).astype(np.float32)
        x[: count // 10] *= 4  # regions are not alike
        is_exact = ok_topk.variant(feedback) != ok_topk.AGAIN
        comm.Allreduce(x, y, compression=feedback)
        assert same_everywhere(comm, y)
        assert feedback.residual is not None
        compensated = before + x
        if is_exact:
            exact += 1
            vectors = [largest(v, k) for v in all_vectors(comm, compensated)]
            np.testing.assert_array_equal(y, largest(added(vectors), k))
        changed = feedback.residual != compensated
        assert (feedback.residual[changed] == 0).all()
        assert (y[changed] != 0).all()
        before = feedback.residual.copy()
    assert 3 <= exact < 30


def test_ok_topk_goes_on_from_a_state_that_was_replaced(comm: Intracomm) -> None:
    """A plan that was made before goes on from the state that is reset or loaded, and keeps it up to date."""
    feedback, x, y = ErrorFeedback("oktopk:0.02"), given(comm.rank, 2000), np.zeros(2000, np.float32)
    comm.Allreduce(x, y, compression=feedback)
    first, state = y.copy(), feedback.state()
    comm.Allreduce(x, y, compression=feedback)
    second, after = y.copy(), feedback.state()
    for step in range(2):
        feedback.reset()
        comm.Allreduce(x, y, compression=feedback)
        np.testing.assert_array_equal(y, first)
        for name, array in feedback.state().items():
            np.testing.assert_array_equal(array, state[name], err_msg=f"{name}, step {step}")
    feedback.load(state)
    comm.Allreduce(x, y, compression=feedback)
    np.testing.assert_array_equal(y, second)
    assert feedback.state().keys() == after.keys()
    for name, array in feedback.state().items():
        np.testing.assert_array_equal(array, after[name], err_msg=name)


def test_the_volume_of_ok_topk(comm: Intracomm) -> None:
    """Below six words an entry and rank, whatever the number of ranks; also if all entries lie in one region."""
    count, density = 200_000, 0.01
    feedback = ErrorFeedback(f"oktopk:{density}")
    sent: list[int] = []
    whole = sparse_encoding.encode

    def counting(*arguments: Any) -> int:
        sent.append(int(whole(*arguments)))
        return sent[-1]

    y = np.zeros(count, np.float32)
    volumes = []
    for step in range(12):
        x = np.random.default_rng([comm.rank, step]).standard_normal(count).astype(np.float32)
        x[count // 8 :] *= 0.01
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sparse_encoding, "encode", counting)
            sent.clear()
            comm.Allreduce(x, y, compression=feedback)
        split, own = sum(sent[: comm.size]), sent[-1]
        volumes.append(split + (comm.size - 1) * own)
    assert np.mean(volumes[1:]) < 6 * 4 * density * count + 64 * comm.size


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("spec", ["topk:0.05", "oktopk:0.05"])
def test_between_nodes_only(verdicts: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, spec: str) -> None:
    monkeypatch.setenv("MPICOLL_NODES", "2")
    plain = WORLD.Dup()
    comm = Intracomm(plain, timeout=TIMEOUT)
    for count in COUNTS:
        y = np.zeros(count, np.float32)
        comm.Allreduce(given(comm.rank, count), y, compression=spec)
        assert same_everywhere(comm, y)
        assert np.count_nonzero(y) > 0
    plain.Free()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("spec", ["topk:0.01", "topk:0.4", "oktopk:0.1"])
def test_damage_ends_the_call_on_all_ranks(comm: Intracomm, monkeypatch: pytest.MonkeyPatch, spec: str) -> None:

    def of_another_codec(length: int) -> Codec:
        return Codec(sparse_codec.encode, error_bounded_codec.decode, settings_of(max(length, 1), 1.0, 1.0))

    if comm.rank == 0:  # its decoder expects a number of bits where the number of entries stands
        monkeypatch.setattr(sparse_codec, "payloads_of", of_another_codec)
    x = given(comm.rank, 5000)

    def twice() -> None:
        """The second time those learn of it who had their result already."""
        for _ in range(2):
            comm.Allreduce(x, x.copy(), compression=spec)

    with pytest.raises(CorruptPayload, match="counts or indices"):
        twice()


def test_nan_arrives(comm: Intracomm) -> None:
    x = given(comm.rank, 3000)
    if comm.rank == comm.size - 1:
        x[1234] = np.nan
    y = np.zeros_like(x)
    for spec in ("topk:0.01", "topk:0.4", "oktopk:0.01"):
        comm.Allreduce(x, y, compression=spec)
        assert np.isnan(y[1234])
        assert np.isfinite(np.delete(y, 1234)).all()
        assert same_everywhere(comm, y)


def test_keys_are_those_of_the_operation(comm: Intracomm) -> None:
    spec = "wangni:0.1"
    x, y = np.ones(2000, np.float32), np.zeros(2000, np.float32)
    comm.Allreduce(x, y, compression=spec)
    first = y.copy()
    comm.Allreduce(x, y, compression=spec)
    assert (first != y).any()
    assert Key(0, 1, 2) != Key(0, 1, 3)


def test_kernels_of_the_second_exchange_are_made_before_the_first(
    comm: Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that is not on disk takes longer to compile than ranks may wait for each other."""
    made: list[Any] = []
    address_of = codec_kernels.address_of

    def noted(kernel: Any) -> int:
        made.append(kernel)
        return address_of(kernel)

    monkeypatch.setattr(codec_kernels, "address_of", noted)
    x, counter = given(comm.rank, 4321), comm._scope.channel.compression_counter
    request: Any = comm.Allreduce_init(x, np.empty_like(x), compression="topk:0.5")
    assert counter[0] == 0, "the operation has not begun"
    kernels = {sparse_codec.largest, sparse_codec.encode, sparse_codec.decode}
    assert kernels | ({sparse_codec.not_zero} if comm.size > 2 else set()) <= set(made)
    request.Free()
