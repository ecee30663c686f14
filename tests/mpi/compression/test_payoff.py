"""``compression="auto"``: one decision for all ranks, measured once, read from tables, never where nothing is sent."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll import Intracomm
from mpicoll.collectives import compression_tuning
from mpicoll.collectives.compression_tuning import SHORTEST, PayingRange
from mpicoll.compression import compressor
from mpicoll.errors import UnknownCompressor
from tests.mpi.compression.test_compressed import given, same_everywhere
from tests.mpi.conftest import TIMEOUT, WORLD

pytestmark = pytest.mark.mpi
COUNT = 20_000


@pytest.fixture
def apart(verdicts: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> Iterator[Intracomm]:
    """A communicator on which every rank is on a node of its own."""
    monkeypatch.setenv("MPICOLL_NODES", ",".join(["1"] * WORLD.size))
    plain = WORLD.Dup()
    yield Intracomm(plain, timeout=TIMEOUT)
    plain.Free()


@pytest.fixture
def nodes(verdicts: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> Iterator[Intracomm]:
    """A communicator of two nodes, one of them with several ranks."""
    monkeypatch.setenv("MPICOLL_NODES", "2")
    plain = WORLD.Dup()
    yield Intracomm(plain, timeout=TIMEOUT)
    plain.Free()


class Clock:
    """Stands in for the measurement of one call: `dense` and `packed` seconds, as this rank sees them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, dense: float, packed: float) -> None:
        self.calls = 0
        self._real = compression_tuning._seconds
        self._times = dense, packed
        monkeypatch.setattr(compression_tuning, "_seconds", self)

    def __call__(self, scope: object, call: object, prepare: object) -> float:
        self.calls += 1
        self._real(scope, call, prepare)  # type: ignore[arg-type]
        return self._times[getattr(call, "compression", None) is not None]


def summed(comm: Intracomm, compression: str | None, count: int = COUNT) -> np.ndarray:
    y = np.zeros(count, np.float32)
    comm.Allreduce(given(comm.rank, count), y, compression=compression)
    assert same_everywhere(comm, y)
    return y


def test_nothing_is_compressed_on_one_node(comm: Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, 1.0, 0.1)
    dense = summed(comm, None)
    for spec in ("auto", "auto:sign", "auto"):
        np.testing.assert_array_equal(summed(comm, spec), dense)
        assert comm.choice("allreduce", dense.nbytes, compression=spec) == comm.choice("allreduce", dense.nbytes)
    assert clock.calls == 0


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("slow_rank", [0, 1])
def test_the_slowest_rank_decides_for_all(apart: Intracomm, slow_rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank but one believes that compressing pays: it does not, and nobody compresses."""
    clock = Clock(monkeypatch, 1.0, 2.0 if apart.rank == slow_rank else 0.1)
    dense = summed(apart, None)
    np.testing.assert_array_equal(summed(apart, "auto"), dense)
    measured = clock.calls
    assert measured > 0
    np.testing.assert_array_equal(summed(apart, "auto"), dense)
    assert clock.calls == measured
    assert apart.choice("allreduce", dense.nbytes, compression="auto") != "two_shot"


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("spec", ["auto", "auto:int4:block=64"])
def test_what_pays_is_compressed(apart: Intracomm, spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, 1.0, 0.8)
    candidate = compression_tuning.candidate(spec)
    wanted = summed(apart, candidate)
    for _ in range(2):
        np.testing.assert_array_equal(summed(apart, spec), wanted)
    measured = clock.calls
    assert apart.choice("allreduce", 4 * COUNT, compression=spec) == "two_shot"
    np.testing.assert_array_equal(summed(apart, spec, 2 * COUNT), summed(apart, candidate, 2 * COUNT))
    assert clock.calls == measured


@pytest.mark.mpi(min_size=2)
def test_in_place(apart: Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, 1.0, 0.8)
    x = given(apart.rank, COUNT)
    apart.Allreduce(MPI.IN_PLACE, x, compression="auto")
    assert clock.calls > 0
    np.testing.assert_array_equal(x, summed(apart, "int8"))


@pytest.mark.mpi(min_size=3)
def test_between_nodes_with_several_ranks(nodes: Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch, 1.0, 0.5)
    np.testing.assert_array_equal(summed(nodes, "auto"), summed(nodes, "int8"))
    assert nodes.choice("allreduce", 4 * COUNT, compression="auto") == "hierarchy"
    # Nonblocking calls go the same way, and use what was measured for blocking ones.
    x, y, compressed = given(nodes.rank, COUNT), *(np.zeros(COUNT, np.float32) for _ in range(2))
    nodes.Iallreduce(x, y, compression="auto").Wait()
    nodes.Iallreduce(x, compressed, compression="int8").Wait()
    np.testing.assert_array_equal(y, compressed)


@pytest.mark.mpi(min_size=2)
def test_nonblocking_calls_measure_nothing_but_use_what_is_known(
    apart: Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, 1.0, 0.5)
    x, y, dense = given(apart.rank, COUNT), *(np.zeros(COUNT, np.float32) for _ in range(2))
    apart.Allreduce(x, dense)
    apart.Iallreduce(x, y, compression="auto").Wait()
    np.testing.assert_array_equal(y, dense)
    assert clock.calls == 0
    packed = summed(apart, "int8")
    plan = apart.Allreduce_init(x, y, compression="auto")
    assert clock.calls > 0
    plan.Start()
    plan.Wait()
    plan.Free()
    np.testing.assert_array_equal(y, packed)
    apart.Iallreduce(x, y, compression="auto").Wait()
    np.testing.assert_array_equal(y, packed)


@pytest.mark.mpi(min_size=2)
def test_measuring_leaves_no_trace(apart: Intracomm) -> None:
    """Real times, whatever they say: what was given stays, and random choices are those of the same program without."""
    x, y = given(apart.rank, COUNT), np.zeros(COUNT, np.float32)
    apart.Allreduce(MPI.IN_PLACE, y, compression="int8")
    before = apart.channel.compressed
    apart.Allreduce(x, y, compression="auto")
    np.testing.assert_array_equal(x, given(apart.rank, COUNT))
    assert apart.channel.compressed - before in (0, 1)
    assert same_everywhere(apart, y)
    known = compression_tuning.known(apart._scope, "int8", y.nbytes)
    assert known is not None
    assert (apart.channel.compressed - before == 1) == known


@pytest.mark.mpi(min_size=2)
def test_a_table_decides_without_measuring(apart: Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, 1.0, 0.5)
    compression_tuning.remember(apart.channel, {"int8": PayingRange(40_000, 80_000), "int4": PayingRange(1 << 30)})
    assert compression_tuning.remembered(apart.channel)["int8"] == (40_000, 80_000)
    np.testing.assert_array_equal(summed(apart, "auto", 9_999), summed(apart, None, 9_999))
    np.testing.assert_array_equal(summed(apart, "auto"), summed(apart, "int8"))
    np.testing.assert_array_equal(summed(apart, "auto:int4"), summed(apart, None))
    assert clock.calls == 0


@pytest.mark.mpi(min_size=2)
def test_what_compressors_do_not_know_is_left_alone(apart: Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, 1.0, 0.5)
    x = np.arange(COUNT, dtype=np.float64)
    apart.Allreduce(MPI.IN_PLACE, x, compression="auto")
    np.testing.assert_array_equal(x, apart.size * np.arange(COUNT))
    y = np.full(COUNT, apart.rank, np.float32)
    apart.Allreduce(MPI.IN_PLACE, y, MPI.MAX, compression="auto")
    assert (y == apart.size - 1).all()
    apart.Allreduce(MPI.IN_PLACE, y, algorithm="ring", compression="auto")
    assert (y == apart.size * (apart.size - 1)).all()
    short = np.ones(SHORTEST // 4 - 1, np.float32)
    apart.Allreduce(MPI.IN_PLACE, short, compression="auto")
    assert clock.calls == 0


@pytest.mark.parametrize("spec", ["auto:int88", "auto:int8:block=7", "auto:auto", "automatic"])
def test_bad_candidates_are_refused_everywhere(comm: Intracomm, spec: str) -> None:
    x = np.ones(10, np.float32)
    with pytest.raises(ValueError, match=r"int88|block|auto"):
        comm.Allreduce(MPI.IN_PLACE, x, compression=spec)


def test_auto_is_no_compressor() -> None:
    with pytest.raises(UnknownCompressor, match=r"'auto:int8' chooses .*; name the compressor: 'int8'"):
        compressor("auto:int8")


def test_verdicts_never_change() -> None:
    numbers = random.Random(7)
    for _ in range(200):
        span, said = PayingRange(), {}
        for _ in range(60):
            nbytes = int(SHORTEST * 2 ** numbers.uniform(-1, 10))
            pays = span.pays(nbytes)
            if pays is None:
                pays = numbers.random() < 0.5
                span = span.with_verdict(nbytes, pays)
            said[nbytes] = pays
            assert span.dense_below <= span.packed_from
            assert all(span.pays(n) is verdict for n, verdict in said.items())
