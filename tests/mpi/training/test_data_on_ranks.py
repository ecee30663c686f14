"""Data sets that several ranks read or hold together."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll import Intracomm
from mpicoll.consensus import all_succeed
from mpicoll.data import distributed_arrays
from mpicoll.data.datasets import load
from mpicoll.data.distributed_arrays import DistributedArrays
from mpicoll.errors import DataError, TrainingError, UsageError
from mpicoll.train.options import parse
from mpicoll.train.training_run import run

pytestmark = pytest.mark.mpi


def mapping_of(array: np.ndarray) -> tuple[str, str]:
    """Return the inode of the memory in which an array lies, and its path."""
    address = array.ctypes.data
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, _, inode, *path = line.split()
        start, stop = (int(word, 16) for word in span.split("-"))
        if start <= address < stop:
            return inode, " ".join(path)
    return "", ""


def proportional_nbytes(array: np.ndarray) -> int:
    """Return this process' part of the memory of an array's mapping, as the system counts it."""
    found, address = 0, array.ctypes.data
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            start, stop = (int(word, 16) for word in words[0].split("-"))
            inside = start <= address < stop
        elif words[0] == "Pss:" and inside:
            found += int(words[1]) << 10
    return found


@pytest.fixture(params=["", "1,2", "2"])
def nodes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param:
        monkeypatch.setenv("MPICOLL_NODES", request.param)
    return str(request.param)


@pytest.mark.parametrize("shared", [False, True])
def test_rows_of_each_rank_come_to_all(comm: Intracomm, nodes: str, shared: bool, monkeypatch: Any) -> None:
    monkeypatch.setattr(distributed_arrays, "_BCAST_NBYTES", 100)
    rows = 5
    wanted = {"x": ("<f4", (rows * comm.size, 3, 2)), "none": ("<i8", (0,)), "y": ("|u1", (rows * comm.size,))}
    copies = DistributedArrays(wanted, comm, shared=shared)
    for owner in reversed(range(comm.size)):
        here = owner == comm.rank
        copies.fill("x", owner * rows, rows, owner, np.full((rows, 3, 2), owner + 0.5) if here else None)
        copies.fill("y", owner * rows, rows, owner, np.full(rows, owner) if here else None)
    arrays = copies.finish()
    np.testing.assert_array_equal(arrays["y"], np.repeat(np.arange(comm.size), rows))
    np.testing.assert_array_equal(arrays["x"], np.repeat(np.arange(comm.size) + 0.5, rows * 6).reshape(-1, 3, 2))
    with pytest.raises(ValueError, match="read-only"):
        arrays["x"][0] = 1


def test_a_node_holds_one_copy(comm: Intracomm, nodes: str) -> None:
    count = 1 << 20
    copies = DistributedArrays({"x": ("<f8", (count,))}, comm, shared=True)
    copies.fill("x", 0, count, 0, np.arange(count, dtype=float) if comm.rank == 0 else None)
    x = copies.finish()["x"]
    assert float(x.sum()) == count * (count - 1) / 2  # all pages are touched on all ranks
    comm.Barrier()
    held = comm.allreduce(proportional_nbytes(x))
    inode, path = mapping_of(x)
    assert "memfd:mpicoll-data" in path
    count_of_nodes = len(set(comm.allgather(inode)))
    expected = {"": 1, "1,2": min(2, comm.size), "2": -(-comm.size // 2)}[nodes]
    if nodes != "1,2" or comm.size <= 3:
        assert count_of_nodes == expected
    assert held == pytest.approx(8 * count * count_of_nodes, rel=0.02)
    del x, copies


def test_memory_of_a_node_is_freed(comm: Intracomm) -> None:
    for _ in range(3):
        copies = DistributedArrays({"x": ("<f8", (1 << 18,))}, comm, shared=True)
        copies.fill("x", 0, 1 << 18, 0, np.ones(1 << 18) if comm.rank == 0 else None)
        arrays = copies.finish()
        del copies, arrays
    assert "mpicoll-data" not in Path("/proc/self/maps").read_text()
    links = [Path(entry.path) for entry in os.scandir("/proc/self/fd")]
    assert not [link for link in links if link.is_symlink() and "mpicoll-data" in os.readlink(link)]  # noqa: PTH115


def test_memory_that_cannot_be_mapped_is_an_error_on_every_rank(comm: Intracomm, monkeypatch: Any) -> None:
    if comm.size == 1:
        pytest.skip("needs two ranks")
    if comm.rank == 0:  # as if it were in a container of its own
        monkeypatch.setattr(distributed_arrays, "process_namespace", lambda: 7)
    with pytest.raises(DataError, match="--share-data: a rank cannot map the memory of process"):
        DistributedArrays({"x": ("<f8", (5,))}, comm, shared=True)


def test_training_on_shared_data_is_the_same_to_the_bit(comm: Intracomm, nodes: str, tmp_path: Path) -> None:
    words = ["--dataset=digits", "--steps=12", "--no-progress", "--quiet"]
    plain, shared = (run(parse([*words, *more]), comm) for more in ([], ["--share-data"]))
    assert shared["parameters_sha256"] == plain["parameters_sha256"]
    assert shared["test_loss"] == plain["test_loss"]


def test_errors_of_reading_reach_every_rank(comm: Intracomm) -> None:
    with pytest.raises(DataError, match="no such file"):
        load(parse(["--dataset=/nowhere/x.npz", "--share-data"]), comm)
    assert comm.allreduce(1, MPI.SUM) == comm.size


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("count", [1, 5])
def test_ranks_divide_files_and_hold_all_rows(comm: Intracomm, shared_folder: Path, count: int, shared: bool) -> None:
    if comm.rank == 0:
        for number in range(count):
            rows = np.arange(4) + 10 * number
            np.savetxt(shared_folder / f"{number}.csv", np.column_stack([rows, rows * 2, rows % 3]), "%d", ",")
    comm.Barrier()
    config = parse(["--dataset", str(shared_folder / "*.csv"), *(["--share-data"] if shared else [])])
    found, alone = load(config, comm), load(config, MPI.COMM_SELF)
    for ours, expected in ((found.train, alone.train), (found.test, alone.test)):
        assert ours.count == expected.count
        for one, other in zip(*(each.batch(np.arange(each.count)) for each in (ours, expected)), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("content", "message"),
    [("1,2,0\n1,2,red\n", "1.csv: could not convert"), ("1,0\n", "1.csv: has columns 0, 1, .*0.csv has 0, 1, 2")],
)
def test_a_part_that_does_not_fit_is_refused_on_every_rank(
    comm: Intracomm, shared_folder: Path, content: str, message: str
) -> None:
    if comm.rank == 0:
        (shared_folder / "0.csv").write_text("1,2,0\n")
        (shared_folder / "1.csv").write_text(content)
    comm.Barrier()
    with pytest.raises(DataError, match=message):
        load(parse(["--dataset", str(shared_folder / "*.csv")]), comm)


def test_what_fails_on_one_rank_is_raised_on_all(comm: Intracomm) -> None:
    last = comm.size - 1

    def action() -> None:
        if comm.rank == last:
            raise KeyError("here")

    with pytest.raises(KeyError if comm.rank == last else TrainingError, match="here"):
        all_succeed(comm, action)
    with pytest.raises((UsageError, TrainingError), match=r"~nosuchuser/x\.json"):
        run(parse(["--json", "~nosuchuser/x.json", "--epochs", "1", "--quiet"]), comm)
    comm.Barrier()
