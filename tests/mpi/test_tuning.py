"""Tables of choices: kept, read by rank 0 for all, and ignored when they are not good."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll import Intracomm, tune
from mpicoll.collectives import compression_tuning, machine_tables, tuning_table
from mpicoll.collectives.compression_tuning import PayingRange
from mpicoll.collectives.select import Rule
from tests.mpi.conftest import TIMEOUT, WORLD

pytestmark = pytest.mark.mpi(min_size=2)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, shared_folder: Path) -> Path:
    """A folder for tables that nobody has read."""
    monkeypatch.setenv("MPICOLL_CACHE_DIR", str(shared_folder))
    monkeypatch.setattr(machine_tables, "_read", {})
    return shared_folder


def fresh() -> Intracomm:
    return Intracomm(WORLD.Dup(), timeout=TIMEOUT)


def test_a_table_is_used_by_all_ranks(folder: Path, comm: Intracomm) -> None:
    if comm.rank == 0:
        tuning_table.save(tuning_table.facts(comm.channel), {"allreduce": (Rule(1024, "ring"), Rule(1 << 62, "tree"))})
    comm.Barrier()
    tuned = fresh()
    assert tuned.choice("allreduce", 100) == "ring"
    assert tuned.choice("allreduce", 1024) == "tree"
    assert tuned.choice("bcast", 100) == comm.choice("bcast", 100)
    data = np.ones(10)
    tuned.Allreduce(MPI.IN_PLACE, data)
    assert (data == comm.size).all()
    tuned.Free()


def test_communicators_made_from_another_know_the_tables_of_their_size(folder: Path, comm: Intracomm) -> None:
    if comm.rank == 0:
        for size in (comm.size, comm.size - 1):
            facts = tuning_table.facts(comm.channel) | {"ranks": size}
            tuning_table.save(facts, {"bcast": (Rule(1 << 62, "native" if size == comm.size else "double_tree"),)})
    comm.Barrier()
    tuned = fresh()
    (path, *_) = folder.glob("tuning-*")
    comm.Barrier()
    if comm.rank == 0:  # what one has told is not read again
        path.unlink()
    part = tuned.Split(int(comm.rank == 0))
    assert tuned.choice("bcast", 100) == "native"
    assert part.size == 1 or part.choice("bcast", 100) == "double_tree"
    part.Free()
    tuned.Free()


def test_native_may_be_the_best(folder: Path, comm: Intracomm) -> None:
    if comm.rank == 0:
        tuning_table.save(tuning_table.facts(comm.channel), {"allreduce": (Rule(1 << 62, "native"),)})
    comm.Barrier()
    tuned = fresh()
    data = np.ones(10)
    tuned.Allreduce(MPI.IN_PLACE, data)
    assert tuned.choice("allreduce", 80) == "native"
    assert (data == comm.size).all()
    tuned.Free()


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace("ring", "no such algorithm"),
        lambda text: text.replace("1024", "1000"),
        lambda text: text.replace('"format": 1', '"format": 99'),
        lambda text: text.replace('"cores": ', '"cores": 9'),
        lambda text: text.replace('"int8"', '"int88"'),
        lambda text: text.replace("65536", "-1"),
        lambda text: "[" * 200_000,
    ],
    ids=["cut", "list", "name", "boundary", "format", "machine", "compressor", "length", "nested"],
)
def test_a_bad_table_costs_one_warning(folder: Path, comm: Intracomm, damage: object) -> None:
    assert callable(damage)
    if comm.rank == 0:
        spans = {"int8": PayingRange(65536, 65536)}
        path = tuning_table.save(tuning_table.facts(comm.channel), {"allreduce": (Rule(1024, "ring"),)}, spans)
        path.write_text(damage(path.read_text()))
    comm.Barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            tuned = fresh()
            assert tuned.choice("allreduce", 100) == comm.choice("allreduce", 100)
            tuned.Free()
    about = [warning for warning in caught if "tuning table" in str(warning.message)]
    assert len(about) == (comm.rank == 0)


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_file_is_no_table(folder: Path, comm: Intracomm, make: Callable[[Path], None]) -> None:
    """Opening a pipe would not end, nor reading a device."""
    if comm.rank == 0:
        make(folder / "tuning-9-ranks-0.json")
    comm.Barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tuned = fresh()
        assert tuned.choice("allreduce", 100) == comm.choice("allreduce", 100)
        tuned.Free()
    told = [str(warning.message) for warning in caught if "tuning table" in str(warning.message)]
    assert ["not a regular file" in text for text in told] == [True] * (comm.rank == 0)


def test_a_folder_whose_name_is_too_long_has_no_tables(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPICOLL_CACHE_DIR", str(folder / ("a" * 300)))
    tuned = fresh()
    tuned.Barrier()
    tuned.choice("allreduce", 100)
    tuned.Free()


def test_tune_keeps_what_it_finds(folder: Path, comm: Intracomm, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--collective", "bcast", "allreduce", "--max-mb", "0", "--seconds", "0.01"]
    assert tune.main([*options, "--dry-run"]) == 0
    assert not list(folder.glob("tuning-*"))
    comm.Barrier()
    assert tune.main(options) == 0
    comm.Barrier()
    (path,) = folder.glob("tuning-*")
    assert set(tuning_table.parse(path.read_text(), tuning_table.facts(comm.channel))[0]) == {"allreduce", "bcast"}
    assert ("shipped choice" in capsys.readouterr().out) == (comm.rank == 0)


@pytest.mark.parametrize("options", [[], ["--library"]], ids=["own", "library"])
def test_the_library_enters_the_table_only_if_wanted(
    folder: Path,
    comm: Intracomm,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
) -> None:
    def compare(plain: MPI.Intracomm, calls: dict[str, object], seconds: float) -> dict[str, SimpleNamespace]:
        return {name: SimpleNamespace(median=1e-6 if name == "native" else 2e-6) for name in calls}

    monkeypatch.setattr(tune, "compare", compare)
    assert tune.main(["--collective", "bcast", "--max-mb", "0", *options]) == 0
    comm.Barrier()
    (path,) = folder.glob("tuning-*")
    (rule,) = tuning_table.parse(path.read_text(), tuning_table.facts(comm.channel))[0]["bcast"]
    assert (rule.name == "native") == bool(options)
    shown = capsys.readouterr().out
    assert ("the MPI library is faster for 8 B; --library" in shown) == (comm.rank == 0 and not options)


def test_tune_finds_where_compressors_pay(folder: Path, comm: Intracomm, capsys: pytest.CaptureFixture[str]) -> None:
    assert tune.main(["--compression", "int8", "fp16", "--max-mb", "0", "--seconds", "0.01"]) == 0
    shown = capsys.readouterr().out
    assert ("int8 does not pay on this node" in shown or "int8 pays from" in shown) == (comm.rank == 0)
    machine_tables._read.clear()
    comm.Barrier()
    tuned = fresh()
    spans = compression_tuning.remembered(tuned.channel)
    assert set(spans) == {"int8", "fp16"}
    numbers = np.array([min(bound, 1e12) for span in spans.values() for bound in span])
    least, most = np.empty_like(numbers), np.empty_like(numbers)
    MPI.Intracomm(comm).Allreduce(numbers, least, MPI.MIN)
    MPI.Intracomm(comm).Allreduce(numbers, most, MPI.MAX)
    np.testing.assert_array_equal(least, most)
    tuned.Free()


def test_wrong_options_end_alike_on_all_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = tune.main(["--no-such-option"])
    except SystemExit as end:
        status = int(end.code or 0)
    assert status == 2
    assert ("--no-such-option" in capsys.readouterr().err) == (WORLD.rank == 0)
