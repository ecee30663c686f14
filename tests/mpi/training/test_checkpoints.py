"""Checkpoints written and read by real ranks, with a disk that is full for one of them."""

from __future__ import annotations

import resource
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll import Intracomm
from mpicoll.checkpoint import BackgroundSaves, CheckpointStore, PerRank, Piece, Tensors, Whole, open_checkpoint
from mpicoll.consensus import share, wait_politely
from mpicoll.data.sampler import part
from mpicoll.errors import CheckpointError

pytestmark = pytest.mark.mpi
TOTAL = 100_003


def state(comm: MPI.Intracomm, value: float) -> Tensors:
    start, stop = part(TOTAL, comm.Get_size(), comm.Get_rank())
    value = float(value)
    return {
        "parameters": Whole(np.arange(TOTAL, dtype=np.float32) + np.float32(value)),
        "velocity": Piece(np.arange(start, stop) * value, start, TOTAL),
        "residual": PerRank(np.full(5, comm.Get_rank() + value)),
    }


def bits(tensors: Tensors) -> list[bytes]:
    return [tensor.array.tobytes() for tensor in tensors.values() if not isinstance(tensor, (PerRank, list))]


def check(comm: MPI.Intracomm, folder: Path, step: int, old_size: int) -> None:
    found = open_checkpoint(folder, comm)
    tensors = state(comm, 0.0)
    found.restore(tensors)
    assert (found.step, found.size, found.facts) == (step, old_size, {"step": step})
    assert bits(tensors) == bits(state(comm, step))
    taken = range(comm.Get_rank(), old_size, comm.Get_size())
    assert [array.tolist() for array in found.per_rank("residual")] == [[rank + step] * 5 for rank in taken]


@pytest.mark.parametrize("kind", ["Intracomm", "MPI.Intracomm"])
def test_a_round_trip_on_either_kind_of_communicator(comm: Intracomm, folder: Path, kind: str) -> None:
    plain = MPI.COMM_WORLD.Dup()
    on: MPI.Intracomm = comm if kind == "Intracomm" else plain
    with CheckpointStore(folder, on) as checkpoints:
        for step in (3, 4):
            checkpoints.save(step, state(on, step), {"step": step})
    check(on, folder, 4, on.Get_size())
    plain.Free()


def test_other_numbers_of_ranks_read_what_some_wrote(subcomm: Intracomm, comm: Intracomm, folder: Path) -> None:
    with CheckpointStore(folder.with_name(f"{MPI.COMM_WORLD.rank - subcomm.rank}"), subcomm) as checkpoints:
        checkpoints.save(7, state(subcomm, 7), {"step": 7})
    wait_politely(comm)
    first = int(share(comm, {"size": subcomm.size} if comm.rank == 0 else None)["size"])
    check(comm, folder.with_name("0"), 7, first)
    check(subcomm, folder.with_name("0"), 7, first)


def test_a_disk_that_is_full_for_one_rank_is_an_error_on_all(comm: Intracomm, folder: Path) -> None:
    with CheckpointStore(folder, comm) as checkpoints:
        checkpoints.save(1, state(comm, 1), {"step": 1})
        tensors, last = state(comm, 2), comm.size - 1
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if comm.rank == last:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        try:
            with pytest.raises(CheckpointError, match=f"rank {last}: .*File too large"):
                checkpoints.save(2, tensors, {"step": 2})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert bits(tensors) == bits(state(comm, 2))
        assert checkpoints.steps() == [1]
        if comm.rank == 0:
            assert sorted(path.name for path in folder.iterdir()) == [".lock", "step-00000001"]
        check(comm, folder, 1, comm.size)
        checkpoints.save(2, tensors, {"step": 2})
    check(comm, folder, 2, comm.size)


def test_damage_is_seen_by_all_and_the_one_before_is_used(comm: Intracomm, folder: Path) -> None:
    with CheckpointStore(folder, comm, patience=0) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state(comm, step), {"step": step})
        last = folder / "step-00000002" / f"rank-{comm.size - 1:04d}.safetensors"
        if comm.rank == 0:
            data = bytearray(last.read_bytes())
            data[-1] ^= 1
            last.write_bytes(data)
        wait_politely(comm)
        with pytest.raises(CheckpointError, match=f"{last}: is not what was written"):
            checkpoints.open()
        found = checkpoints.open(fallback=True)
        assert found.step == 1
        assert [rejected.step for rejected in found.rejected] == [2]


def test_ranks_that_disagree_are_told_so(comm: Intracomm, folder: Path) -> None:
    if comm.size == 1:
        pytest.skip("nobody to disagree with")
    with CheckpointStore(folder, comm) as checkpoints:
        with pytest.raises(CheckpointError, match="must be one"):
            checkpoints.save(comm.rank, {}, {})
        with pytest.raises(CheckpointError, match="x: rank 1 has whole"):
            checkpoints.save(1, {"x": Whole(np.zeros(3 + (comm.rank == 1)))}, {})
        with pytest.raises(CheckpointError, match="another run"):
            CheckpointStore(folder, comm)
        assert checkpoints.steps() == []


def test_the_program_goes_on_while_a_thread_writes(
    comm: Intracomm, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it does to its arrays meanwhile is not saved; its own collectives are not disturbed."""
    gate = threading.Event()
    write = CheckpointStore._write
    monkeypatch.setattr(CheckpointStore, "_write", lambda *given: (gate.wait(30), write(*given))[1])
    private = comm.Dup()
    with CheckpointStore(folder, private) as checkpoints:
        saves = BackgroundSaves(checkpoints)
        tensors = state(comm, 5)
        saves.save(5, tensors, {"step": 5})
        for tensor in tensors.values():
            tensor.array[...] = -1  # type: ignore[union-attr]
        for _ in range(20):
            total = comm.allreduce(comm.rank)
        assert total == sum(range(comm.size))
        assert checkpoints_in(folder) == []
        gate.set()
        saves.wait()
        check(comm, folder, 5, comm.size)
        saves.save(6, state(comm, 6), {"step": 6})
        saves.save(7, state(comm, 7), {"step": 7})  # waits for the one before
        assert 6 in checkpoints_in(folder)
        saves.wait()
        saves.wait()
    check(comm, folder, 7, comm.size)
    private.Free()


def checkpoints_in(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))


def test_a_save_that_fails_is_an_error_of_the_next_call_on_all_ranks(
    comm: Intracomm, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private = comm.Dup()
    with CheckpointStore(folder, private) as checkpoints:
        saves = BackgroundSaves(checkpoints)
        saves.save(1, state(comm, 1), {"step": 1})
        saves.wait()
        with monkeypatch.context() as patch:
            if comm.rank == comm.size - 1:
                patch.setattr("mpicoll.checkpoint.writer._write_file", full)
            saves.save(2, state(comm, 2), {"step": 2})
            with pytest.raises(CheckpointError, match=f"rank {comm.size - 1}: .*full"):
                saves.save(3, state(comm, 3), {"step": 3})
        saves.save(4, state(comm, 4), {"step": 4})
        saves.wait()
    check(comm, folder, 4, comm.size)
    private.Free()


def full(*given: object) -> tuple[int, str]:
    time.sleep(0.05)
    raise OSError(28, "the disk is full")
