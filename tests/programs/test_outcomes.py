"""The comparison of outcomes fails where it has to, and the table agrees with pyproject.toml."""

from __future__ import annotations

import io
import json
import re
import tarfile
from pathlib import Path

import pytest

from tests.mpirun import REPOSITORY
from tests.programs.execute import Measurement
from tests.programs.outcomes import Run, compare, read
from tests.programs.sources import Unavailable, require_installed, unpack
from tests.programs.table import PROGRAMS, Program, named


def run_of(**outcomes: str) -> Run:
    return Run({(0, name): outcome for name, outcome in outcomes.items()}, {(0, "a"): "the reason"}, 2.0)


def write(folder: Path, rank: int, world: str, **outcomes: str) -> None:
    content = {"seconds": 1.5 + rank, "world": world, "outcomes": outcomes, "texts": {}}
    (folder / f"rank-{rank}.json").write_text(json.dumps(content))


def test_equal_outcomes_are_good() -> None:
    assert compare([run_of(a="passed", b="skipped")], [run_of(a="passed", b="skipped")]).good


@pytest.mark.parametrize("outcome", ["failed", "skipped"])
def test_a_test_that_passes_with_mpi4py_only_is_worse(outcome: str) -> None:
    found = compare([run_of(a="passed")], [run_of(a="passed"), run_of(a=outcome)])
    assert not found.good
    assert found.worse == {(0, "a"): f"{outcome} instead of passed\nthe reason"}


def test_a_test_that_did_not_run_is_worse() -> None:
    found = compare([run_of(a="passed", b="passed")], [run_of(a="passed")])
    assert found.worse == {(0, "b"): "not run instead of passed\n"}


def test_a_test_that_fails_with_mpi4py_once_may_end_as_it_likes() -> None:
    found = compare([run_of(a="passed"), run_of(a="failed")], [run_of(a="failed"), run_of(a="passed")])
    assert found.good
    assert found.failed_plain == {(0, "a")}


@pytest.mark.parametrize("side", [0, 1])
def test_a_run_without_an_end_is_not_good(side: int) -> None:
    runs = [[run_of(a="passed")], [run_of(a="passed")]]
    runs[side][0].trouble = "status 1"
    assert not compare(*runs).good


def test_all_ranks_have_to_end(tmp_path: Path) -> None:
    write(tmp_path, 0, "mpi4py.MPI", a="passed")
    assert "rank 1 did not come to the end" in read(tmp_path, 2, "mpi4py").trouble
    write(tmp_path, 1, "mpi4py.MPI", a="failed")
    run = read(tmp_path, 2, "mpi4py")
    assert (run.trouble, run.seconds) == ("", 1.5)
    assert run.outcomes == {(0, "a"): "passed", (1, "a"): "failed"}


def test_a_run_on_other_communicators_is_not_good(tmp_path: Path) -> None:
    write(tmp_path, 0, "mpi4py.MPI", a="passed")
    assert "MPI.COMM_WORLD is of mpi4py.MPI, not of mpicoll" in read(tmp_path, 1, "mpicoll").trouble


def test_a_run_in_which_nothing_passes_is_not_good(tmp_path: Path) -> None:
    write(tmp_path, 0, "mpi4py.MPI", a="skipped")
    assert read(tmp_path, 1, "mpi4py").trouble == "no test passed"


def test_a_row_says_how_many_passed_and_what_it_took() -> None:
    slow, worse = run_of(a="passed", b="passed"), run_of(a="passed", b="failed")
    slow.seconds = 3.0
    measurement = Measurement(Program("thing==1.0", "", ()), 3, [run_of(a="passed", b="passed")], [slow])
    assert measurement.row().split() == ["thing==1.0", "3", "2", "2", "same", "2.0", "3.0", "1.50"]
    measurement.ours = [worse]
    assert measurement.row().split()[2:6] == ["2", "1", "1", "worse"]
    assert list(measurement.record()["worse"]) == ["b on rank 0"]


def test_the_extra_installs_the_programs_of_the_table() -> None:
    found = re.search(r"^programs = \[(.*?)\]", (REPOSITORY / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    assert found
    assert sorted(re.findall(r'"(.+?)"', found[1])) == sorted(program.requirement for program in PROGRAMS)


def test_a_program_that_is_not_installed_is_named() -> None:
    with pytest.raises(Unavailable, match="no-such-program is not installed"):
        require_installed(Program("no-such-program==1.0", "", ()))
    with pytest.raises(Unavailable, match=r"1\.0 is wanted"):
        require_installed(Program("numpy==1.0", "", ()))
    with pytest.raises(ValueError, match="'nothing' is none of"):
        named("nothing")


def test_only_the_folders_with_tests_are_unpacked(tmp_path: Path) -> None:
    archive = tmp_path / "thing-1.0.tar.gz"
    names = ("thing-1.0/thing.py", "thing-1.0/tests/test_a.py", "thing-1.0/tests/../../b.py", "thing-1.0/tests2/c.py")
    with tarfile.open(archive, "w:gz") as made:
        for name in names:
            made.addfile(tarfile.TarInfo(name), io.BytesIO())
    unpack(archive, ("tests",), tmp_path / "made")
    assert [path.relative_to(tmp_path / "made") for path in (tmp_path / "made").rglob("*.py")] == [
        Path("tests/test_a.py")
    ]
    with pytest.raises(Unavailable, match="has no examples"):
        unpack(archive, ("tests", "examples"), tmp_path / "other")
