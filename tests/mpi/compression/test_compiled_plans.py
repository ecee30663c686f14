"""Plans with codecs: the executor does every row, and does what the rows' Python functions do, to the bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll import ErrorFeedback, Intracomm
from mpicoll.compression import Compressor, Key, Sparsifier, compressor
from mpicoll.errors import CorruptPayload
from mpicoll.kernels import instructions
from mpicoll.kernels.codecs import counter_random
from mpicoll.messages import bound_plan
from mpicoll.messages.bound_plan import Table
from mpicoll.messages.codec_calls import CompressedChunk, Decode, Encode, NextKeys
from mpicoll.messages.sparse_memory import SelectedEntries, SparsePayload
from tests.mpi import call_forms
from tests.mpi.call_forms import FORMS
from tests.mpi.compression.test_compressed import given
from tests.mpi.conftest import TIMEOUT, WORLD

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(bound_plan.functions() is None, reason="all rows are executed from Python here"),
]
SPECS = (
    "int8",
    "int5:64",
    "int4:rounding=stochastic",
    "fp8:rounding=stochastic",
    "e5m2",
    "sign",
    "natural",
    "qsgd",
    "ternary:clip=2.5",
    "bf16",
    "fp16",
    "error:1e-3",
)
SPARSE = ("topk:0.3", "topk:k=2", "sampled:0.2", "wangni:0.2", "wangni:variance=3")
COUNTS = (1, 513, 5000)


def ways(specs: Sequence[str]) -> list[tuple[str, bool]]:
    """Return each specification without error feedback and, if it is biased, with it."""
    return [(spec, way) for spec in specs for way in (False, True) if not (way and compressor(spec).unbiased)]


@dataclass(frozen=True)
class FromPython(Compressor):
    """A compressor of a user's: that of a specification, without its codec."""

    spec: str

    @property
    def granularity(self) -> int:
        return compressor(self.spec).granularity

    @property
    def fixed(self) -> bool:  # type: ignore[override]
        return compressor(self.spec).fixed

    def wire_nbytes(self, count: int) -> int:
        return compressor(self.spec).wire_nbytes(count)

    def compress(self, x: np.ndarray, out: np.ndarray, key: Key) -> int:
        return compressor(self.spec).compress(x, out, key)

    def decompress(self, payload: np.ndarray, out: np.ndarray) -> None:
        compressor(self.spec).decompress(payload, out)


@dataclass(frozen=True)
class SelectsInPython(Sparsifier):
    """A sparsifier of a user's: that of a specification, without its selector."""

    spec: str

    @property
    def _made(self) -> Sparsifier:
        made = compressor(self.spec)
        assert isinstance(made, Sparsifier)
        return made

    def capacity(self, count: int) -> int:
        return self._made.capacity(count)

    def select(self, x: np.ndarray, key: Key, indices: np.ndarray, values: np.ndarray) -> int:
        return self._made.select(x, key, indices, values)


@pytest.fixture
def another(verdicts: MPI.Intracomm) -> Iterator[Intracomm]:
    """A second communicator, which numbers its operations as the first one does."""
    plain = WORLD.Dup()
    yield Intracomm(plain, timeout=TIMEOUT)
    plain.Free()


def results(comm: Intracomm, compression: Any) -> list[np.ndarray]:
    """Make several calls in all forms; return their results, and the residuals of error feedback."""
    found = []
    for count in COUNTS:
        made = ErrorFeedback(compression.compressor) if isinstance(compression, ErrorFeedback) else compression
        for step, form in enumerate(FORMS * 2):
            y = np.empty(count, np.float32)
            call_forms.make(comm, form, "allreduce", given(comm.rank + 100 * step, count), y, compression=made)
            found.append(y)
            if isinstance(made, ErrorFeedback):
                found += [
                    made.residual.copy(),
                    *([] if made.result_residual is None else [made.result_residual.copy()]),
                ]
                if step == 2:  # the residuals lie elsewhere afterwards
                    made.load(made.state())
    return found


def kinds(comm: Intracomm, compression: Any) -> list[int]:
    """Return the instructions of a persistent operation."""
    count = 2000 * comm.size  # no rank's shard is empty
    x, y = np.ones(count, np.float32), np.ones(count, np.float32)
    request: Any = comm.Allreduce_init(x, y, compression=compression)
    rows = [row[instructions.OPERATION] for row in request._plan.table._rows[1:]]
    request.Free()
    return rows


@pytest.mark.parametrize("spec", SPECS)
def test_the_executor_does_every_row(comm: Intracomm, spec: str) -> None:
    rows = kinds(comm, spec)
    assert instructions.CALL not in rows
    assert rows.count(instructions.ENCODE) == comm.size + 1
    assert rows.count(instructions.DECODE) == 2 * comm.size
    if not compressor(spec).unbiased:
        assert kinds(comm, ErrorFeedback(spec)).count(instructions.CALL) == 2  # its begin and its end
    assert instructions.CALL in kinds(comm, FromPython(spec))


@pytest.mark.parametrize("spec", SPARSE)
def test_the_executor_does_every_row_of_sparse_vectors(comm: Intracomm, spec: str) -> None:
    rows = kinds(comm, spec)
    assert instructions.CALL not in rows
    rounds = 1 if spec == "topk:k=2" or comm.size <= 2 else 2
    assert rows.count(instructions.SEND_PREFIXED) == (comm.size > 1) * rounds
    own = SelectsInPython(spec)
    assert kinds(comm, own).count(instructions.CALL) == 1
    if compressor(spec).unbiased:
        return
    assert kinds(comm, ErrorFeedback(spec)).count(instructions.CALL) == 2  # its begin and its end
    assert kinds(comm, ErrorFeedback(own)).count(instructions.CALL) == 4  # also what is taken out of the residual


@pytest.mark.parametrize(("spec", "with_feedback"), ways([*SPECS, *SPARSE]))
def test_the_bits_are_those_of_python(
    comm: Intracomm, another: Intracomm, monkeypatch: pytest.MonkeyPatch, spec: str, with_feedback: bool
) -> None:
    compiled = results(comm, ErrorFeedback(spec) if with_feedback else spec)
    sent = comm._scope.channel.messages_nbytes
    with monkeypatch.context() as patch:
        patch.setattr(bound_plan, "functions", lambda: None)
        expected = results(another, ErrorFeedback(spec) if with_feedback else spec)
    assert all((one.view(np.uint32) == two.view(np.uint32)).all() for one, two in zip(compiled, expected, strict=True))
    assert sent == another._scope.channel.messages_nbytes
    assert (comm.size > 1) == (sent > 0)


@pytest.mark.parametrize(("spec", "with_feedback"), ways(["int4:rounding=stochastic", "error:1e-3", *SPARSE]))
def test_a_compressor_written_in_python_gives_the_same_bits(
    comm: Intracomm, another: Intracomm, spec: str, with_feedback: bool
) -> None:
    own = SelectsInPython(spec) if spec in SPARSE else FromPython(spec)
    expected = results(comm, ErrorFeedback(spec) if with_feedback else spec)
    found = results(another, ErrorFeedback(own) if with_feedback else own)
    assert all((one.view(np.uint32) == two.view(np.uint32)).all() for one, two in zip(found, expected, strict=True))


@dataclass(frozen=True)
class SelectsWrongly(SelectsInPython):
    """A sparsifier of a user's that returns these indices."""

    wrong: tuple[int, ...] = ()

    def select(self, x: np.ndarray, key: Key, indices: np.ndarray, values: np.ndarray) -> int:
        indices[: len(self.wrong)], values[: len(self.wrong)] = self.wrong, 1.0
        return len(self.wrong)


@pytest.mark.parametrize("wrong", [(3, 1000), (5, 4), (5, 5), (2**32 - 1,)])
@pytest.mark.parametrize("with_feedback", [False, True])
def test_wrong_indices_of_a_sparsifier_are_refused(
    comm: Intracomm, wrong: tuple[int, ...], with_feedback: bool
) -> None:
    own = SelectsWrongly("topk:k=2", wrong)
    x, y = np.ones(1000, np.float32), np.ones(1000, np.float32)
    with pytest.raises(ValueError, match="select: its indices do not increase strictly, or reach the count 1000"):
        comm.Allreduce(x, y, compression=ErrorFeedback(own) if with_feedback else own)


def run(*calls: Any) -> None:
    table = Table()
    for call in calls:
        table.call(call)
    table.close()
    assert table.is_compiled
    table.start()
    assert table.advance()


@pytest.mark.parametrize("spec", ["int4:rounding=stochastic", "wangni:0.3", "randomk:0.3"])
def test_nonblocking_calls_make_the_same_choices_whichever_ends_first(
    spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over nodes, the exchange between these begins when that within each node has ended."""
    monkeypatch.setenv("MPICOLL_NODES", "2")

    def sums(backwards: bool) -> np.ndarray:
        plain = MPI.COMM_WORLD.Dup()
        own, results = Intracomm(plain, timeout=20), np.empty((4, 5000), np.float32)
        given = np.random.default_rng([1, own.rank]).standard_normal(results.shape).astype(np.float32)
        requests = [own.Iallreduce(x, y, compression=spec) for x, y in zip(given, results, strict=True)]
        for request in reversed(requests) if backwards else requests:
            request.Wait()
        plain.Free()
        return results

    first = sums(backwards=False)
    for backwards in (True, MPI.COMM_WORLD.rank % 2 == 0, False):
        np.testing.assert_array_equal(sums(backwards), first)


def test_keys_are_those_of_python(comm: Intracomm) -> None:
    channel = comm._scope.channel
    channel.compressed = 2**40
    keys = NextKeys(channel)
    run(keys)
    assert channel.compressed == 2**40 + 1
    for shot in range(2):
        expected = counter_random.key(0, channel.identity, 2 * (2**40 + 1) + shot)
        assert (keys.key_words(shot) == expected).all()
        assert (keys.key(shot, 64).words() == expected).all()


@pytest.mark.parametrize("nbytes", [-1, 1 << 40, -(1 << 62)])
def test_a_length_beyond_the_payload_is_refused(verdicts: MPI.Intracomm, nbytes: int) -> None:
    chunk, out = CompressedChunk(compressor("error:1e-3"), 100, np.empty), np.zeros(100, np.float32)
    chunk.compress(np.ones(100, np.float32), Key())
    run(Decode(chunk, out))
    assert np.abs(out - 1).max() <= 1e-3
    chunk.memory[:8].view(np.int64)[0] = nbytes
    with pytest.raises(CorruptPayload, match=f"its head says {nbytes}"):
        run(Decode(chunk, out))


@pytest.mark.parametrize("cut", [1, 4])
def test_a_payload_that_is_cut_is_refused(verdicts: MPI.Intracomm, cut: int) -> None:
    chunk, out = CompressedChunk(compressor("error:1e-3"), 100, np.empty), np.zeros(100, np.float32)
    chunk.compress(np.ones(100, np.float32), Key())
    chunk.memory[:8].view(np.int64)[0] -= cut
    with pytest.raises(CorruptPayload, match="no multiple of 4" if cut == 1 else "do not fit its length"):
        run(Decode(chunk, out))


def sparse_payload(channel: Any) -> SparsePayload:
    """Return the payload of 20 of 100 elements."""
    sparsifier, keys = compressor("topk:0.2"), NextKeys(channel)
    assert isinstance(sparsifier, Sparsifier)
    x = (np.arange(100) + 1).astype(np.float32)
    entries, payload = SelectedEntries(sparsifier, 100, np.empty), SparsePayload(20, 100, np.empty)
    run(keys, Encode(x, entries, keys, 0, 0), Encode(entries.words, payload, keys, 0, 0))
    out = np.zeros(100, np.float32)
    run(Decode(payload, out))
    assert (out == np.where(x > 80, x, 0)).all()
    return payload


@pytest.mark.parametrize("nbytes", [-1, 1 << 40, -(1 << 62)])
def test_a_length_beyond_a_sparse_payload_is_refused(comm: Intracomm, nbytes: int) -> None:
    payload, out = sparse_payload(comm._scope.channel), np.full(100, 7, np.float32)
    payload.memory[:8].view(np.int64)[0] = nbytes
    with pytest.raises(CorruptPayload, match=f"its head says {nbytes}"):
        run(Decode(payload, out))
    assert (out == 7).all()


@pytest.mark.parametrize("damage", ["cut", "cut by a word", "count", "block", "order", "beyond", "empty"])
def test_a_sparse_payload_that_is_damaged_is_refused(comm: Intracomm, damage: str) -> None:
    payload, out = sparse_payload(comm._scope.channel), np.full(100, 7, np.float32)
    length, words = payload.memory[:8].view(np.int64), payload.body.view(np.uint32)
    halves = payload.body.view(np.uint16)
    if damage == "empty":
        length[0] = 0
    elif damage.startswith("cut"):
        length[0] -= 1 if damage == "cut" else 4
    elif damage in ("count", "block"):
        words[int(damage == "block")] += np.uint32(1)
    else:
        halves[4 + 19] = 100 if damage == "beyond" else 81
    with pytest.raises(CorruptPayload, match="counts or indices are invalid"):
        run(Decode(payload, out, add=True))
    assert (out == 7).all()
