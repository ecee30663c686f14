"""Memory that the ranks of a node have in common in a file."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll.shared_memory import common_file

NBYTES = 100_000


@pytest.fixture(scope="module")
def plain() -> MPI.Intracomm:
    made: MPI.Intracomm = MPI.COMM_WORLD.Dup()
    yield made
    made.Free()


def left_behind() -> list[Path]:
    return list(common_file.DIRECTORY.glob("mpicoll-*"))


def test_every_rank_sees_what_the_others_write(plain: MPI.Intracomm) -> None:
    memory = common_file.common_memory(plain, NBYTES)
    assert memory.shape == (NBYTES,)
    assert not memory.any()
    plain.Barrier()
    memory[plain.rank :: plain.size] = plain.rank + 1
    plain.Barrier()
    assert (memory == np.arange(NBYTES) % plain.size + 1).all()
    plain.Barrier()
    assert not left_behind()


@pytest.mark.parametrize("failing", ["first", "last"])
def test_a_rank_without_the_file_is_an_error_on_all(
    plain: MPI.Intracomm, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if plain.rank == (0 if failing == "first" else plain.size - 1):
        monkeypatch.setattr(common_file, "_mapped", lambda *_: (_ for _ in ()).throw(OSError("no memory left")))
    with pytest.raises(common_file.NoCommonMemory, match=f"{NBYTES} bytes in /dev/shm"):
        common_file.common_memory(plain, NBYTES)
    plain.Barrier()
    assert not left_behind()


def test_a_file_of_another_length_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"\0" * 8)
    (tmp_path / "link").symlink_to(tmp_path / "short")
    assert common_file._opened(tmp_path / "short", 8) is not None
    assert common_file._opened(tmp_path / "short", 16) is None  # an access behind the end would end the process
    assert common_file._opened(tmp_path / "link", 8) is None
    assert common_file._made(tmp_path / "short", 8) is None


def test_two_threads_make_memory_at_the_same_time(plain: MPI.Intracomm) -> None:
    """Windows of the MPI library are no alternative: Open MPI 5.0 corrupts its heap here."""
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        pytest.skip("the MPI library serves one thread")
    comms = [plain.Dup() for _ in range(2)]
    wrong: list[object] = []

    def make(comm: MPI.Intracomm) -> None:
        try:
            for number in range(1, 30):
                memory = common_file.common_memory(comm, NBYTES)
                if comm.rank == 0:
                    memory[:] = number
                comm.Barrier()
                wrong.extend([number] * bool((memory != number).any()))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=make, args=(comm,)) for comm in comms]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for comm in comms:
        comm.Free()
    assert not wrong
