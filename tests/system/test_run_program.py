"""An unmodified program by `python -m mpicoll run`, with and without a profile, and with the MPI library alone."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from mpicoll.program.program_session import FAILED_SECONDS
from tests import extent
from tests.mpirun import REPOSITORY, Outcome, run

PROGRAM = REPOSITORY / "tests" / "system" / "programs" / "unmodified.py"
SOURCE = PROGRAM.read_text().splitlines()
SIZE = 3


def launch(*arguments: str, **variables: str) -> Outcome:
    outcome = run(SIZE, ["-m", "mpicoll", "run", *arguments], timeout=90, environment=variables)
    assert not outcome.hung, outcome.report
    return outcome


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profiles")


@pytest.fixture(scope="module")
def ours(folder: Path) -> Outcome:
    files = ("--json", str(folder / "ours.json"), "--html", str(folder / "ours.html"))
    return launch("--compare", "2", "--shared-arrays", *files, str(PROGRAM), "a", "--json")


@pytest.fixture(scope="module")
def native(folder: Path) -> Outcome:
    return launch("--native", "--compare=0", "--json", str(folder / "native.json"), "--", str(PROGRAM), "exit")


@lru_cache(maxsize=4)
def profile_in(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


def line_of(text: str) -> int:
    (found,) = (number for number, line in enumerate(SOURCE, 1) if text in line)
    return found


def sites(profile: dict[str, Any]) -> dict[tuple[int, str, int], tuple[int, list[int] | None]]:
    return {
        (site["line"], site["call"], site["size"]): (site["calls"], site["nbytes"])
        for site in profile["sites"]
        if site["file"] == str(PROGRAM)
    }


EXPECTED = {
    (line_of("comm.Allreduce(data, result)"), "Allreduce", 3): (40, [80, 8000]),
    (line_of("comm.allreduce(Thing"), "allreduce", 3): (1, None),
    (line_of("comm.Bcast("), "Bcast", 3): (1, [40, 40]),
    (line_of("part.Allreduce"), "Allreduce", 2): (20, [24, 24]),
    (line_of("part.Allreduce"), "Allreduce", 1): (20, [24, 24]),
    (line_of("comm.Iallgather"), "Iallgather", 3): (1, [24, 24]),
    (line_of("comm.Allreduce_init"), "Allreduce_init", 3): (3, [8000, 8000]),
    (line_of("MPI.TWOINT"), "Allreduce", 3): (1, [8, 8]),
    (line_of("comm.alltoall("), "alltoall", 3): (1, None),
    (line_of("grid.Neighbor_allgather"), "Neighbor_allgather", 3): (1, None),
    (line_of("MPI.COMM_SELF.allreduce"), "allreduce", 1): (1, [8, 8]),
    (line_of("comm.gather("), "gather", 3): (1, None),
    (SOURCE.index("    comm.Barrier()") + 1, "Barrier", 3): (1, [0, 0]),
}


def check_sites(profile: dict[str, Any]) -> None:
    found = sites(profile)
    assert found.keys() == EXPECTED.keys()
    for key, (calls, nbytes) in EXPECTED.items():
        assert found[key][0] == calls, key
        assert nbytes is None or found[key][1] == nbytes, key
    assert {site["function"] for site in profile["sites"]} >= {"main", "reduce_often"}


def test_communicators_are_ours_and_the_program_notices_nothing(ours: Outcome) -> None:
    assert ours.returncode == 0, ours.text
    facts = [3, [0, 1, 2, 3, 4], [8], 6.0, "mpicoll", "mpicoll", "mpicoll"]
    assert ours.stdout == f"{['a', '--json']} {[facts] * SIZE}\n"


def test_native_communicators_are_mpi4pys_and_the_status_is_the_programs(native: Outcome) -> None:
    assert native.returncode == 7, native.text
    assert "[3, [0, 1, 2, 3, 4], [8], 6.0, 'mpi4py', 'mpi4py', 'mpi4py']" in native.stdout


def test_the_profile_has_all_calls_where_they_were_made(ours: Outcome, folder: Path) -> None:
    assert ours.returncode == 0, ours.text
    profile = profile_in(folder / "ours.json")
    check_sites(profile)
    assert (profile["mode"], profile["ranks"], profile["nodes"], profile["status"]) == ("mpicoll", SIZE, 1, 0)
    assert all(
        0 < used < wall for used, wall in zip(profile["collective_seconds"], profile["wall_seconds"], strict=True)
    )
    assert 0 <= profile["overhead_seconds_per_call"] < 1e-3  # a difference of two times, 0 if it is negative
    for site in profile["sites"]:
        assert 0 <= site["waiting_seconds"] <= site["seconds"]
        assert sum(each["share_of_calls"] for each in site["slowest"]) <= 1 + 1e-9
    (divided,) = (site for site in profile["sites"] if (site["line"], site["size"]) == (line_of("part.Allreduce"), 2))
    first, *later = divided["transports"]  # the library's calls before it became one of mpicoll's communicators
    assert first == "MPI library"
    assert len(later) == 1


def test_calls_are_made_again_by_both(ours: Outcome, folder: Path) -> None:
    assert ours.returncode == 0, ours.text
    profile = profile_in(folder / "ours.json")
    compared = {(each["call"], each["size"], each["nbytes"]): each for each in profile["compared"]}
    assert compared
    for each in compared.values():
        per_call = each["transfer_seconds"] * SIZE / (each["calls"] * each["size"])
        assert each["transfer_seconds_per_call"] == pytest.approx(per_call)
        assert each["ratio"] is None or each["ratio"] == pytest.approx(
            each["library_seconds"] / each["mpicoll_seconds"]
        )
    assert any(each["ratio"] for each in compared.values())
    assert profile["advice"]["sentence"] in ours.stderr
    heads = "program, a call", "mpicoll, a call", "MPI library, a call"
    page = (folder / "ours.html").read_text()
    assert all(head in ours.stderr and f"<th>{head}</th>" in page for head in heads)


def test_the_native_profile_has_the_same_calls(native: Outcome, folder: Path) -> None:
    assert native.returncode == 7, native.text
    profile = profile_in(folder / "native.json")
    check_sites(profile)
    assert (profile["mode"], profile["compared"], profile["status"]) == ("native", [], 7)


def test_ranks_with_an_exit_status_wait_until_the_profile_is_written(tmp_path: Path) -> None:
    pipe, texts = tmp_path / "profile.json", []
    os.mkfifo(pipe)

    def read_late() -> None:
        time.sleep(3)  # rank 0 cannot open the pipe before
        texts.append(pipe.read_text())

    reader = threading.Thread(target=read_late, daemon=True)
    reader.start()
    outcome = launch("--native", "--compare=0", "--json", str(pipe), "--", str(PROGRAM), "exit")
    assert outcome.returncode == 7, outcome.text
    reader.join(10)
    assert texts, outcome.text
    assert json.loads(texts[0])["status"] == 7


def test_the_text_goes_to_standard_error_once(ours: Outcome, native: Outcome) -> None:
    for outcome in (ours, native):
        assert outcome.stderr.count("mpicoll profile: ") == 1
        assert f"programs/unmodified.py:{line_of('comm.Allreduce(data, result)')} reduce_often" in outcome.stderr


def test_the_page_holds_everything_itself(ours: Outcome, folder: Path) -> None:
    assert ours.returncode == 0, ours.text
    page = (folder / "ours.html").read_text()
    assert page.startswith("<!DOCTYPE html>")
    assert not re.search(r"(src|href)=|@import|url\(", page)
    assert "&lt;module&gt;" not in page or "<module>" not in page
    assert page.count('<rect class="work"') == min(20, len(profile_in(folder / "ours.json")["sites"])) + SIZE


def test_files_that_cannot_be_written_are_refused_before_the_program_runs(tmp_path: Path) -> None:
    for place, why in ((tmp_path, "is a folder"), (tmp_path / "missing" / "profile.json", "is not a folder")):
        outcome = launch("--json", str(place), str(PROGRAM))
        assert outcome.returncode == 2, outcome.text
        assert why in outcome.stderr
        assert not outcome.stdout


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--compare 3", "--compare has no meaning without --profile"),
        ("--compare 0", "--compare has no meaning without --profile"),
        ("--native --timeout 5", "--timeout has no meaning with --native"),
        ("--native --library-calls 0", "--library-calls has no meaning with --native"),
    ],
)
def test_options_that_would_change_nothing_are_refused(options: str, says: str) -> None:
    outcome = launch(*options.split(), str(PROGRAM))
    assert outcome.returncode == 2, outcome.text
    assert outcome.stderr.count(says) == 1
    assert not outcome.stdout


def test_an_exception_on_one_rank_ends_the_job_with_its_own_frames_only() -> None:
    outcome = launch("--profile", str(PROGRAM), "raise")
    assert outcome.returncode == 1, outcome.text
    traceback = outcome.stderr.partition("Traceback (most recent call last):\n")[2]
    assert traceback.splitlines()[0] == f'  File "{PROGRAM}", line {len(SOURCE)}, in <module>'
    assert "KeyError: 'the culprit'" in traceback
    assert "these are the calls of rank 1 only" in outcome.stderr
    assert "mpicoll: rank 1 failed; the job ends" in outcome.stderr


def test_a_failed_rank_writes_its_own_calls_to_files_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    files = {kind: tmp_path / f"profile.{kind}" for kind in ("json", "html")}
    options = [word for kind, path in files.items() for word in (f"--{kind}", str(path))]
    outcome = launch(*options, str(PROGRAM), "raise")
    assert outcome.returncode == 1, outcome.text
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {"profile.rank1.json", "profile.rank1.html"}
    assert f"the calls of rank 1 are in {tmp_path / 'profile.rank1.json'} and " in outcome.stderr
    profile = json.loads((tmp_path / "profile.rank1.json").read_text())
    assert (profile["missing"], profile["of_ranks"], profile["status"]) == (True, [1], 1)
    assert profile["sites"]
    assert "these are the calls of rank 1 only" in (tmp_path / "profile.rank1.html").read_text()


def test_a_hook_that_exits_does_not_leave_the_other_ranks_waiting(tmp_path: Path) -> None:
    program = tmp_path / "hook.py"
    program.write_text(
        "import sys\n"
        "from mpi4py import MPI\n"
        "sys.excepthook = lambda *error: sys.exit(7)\n"
        "if MPI.COMM_WORLD.rank == 1:\n"
        "    raise ValueError('wrong on purpose')\n"
        "MPI.COMM_WORLD.barrier()\n"
    )
    outcome = launch(str(program))
    assert outcome.returncode == 7, outcome.text
    assert "mpicoll: rank 1 failed; the job ends" in outcome.stderr, outcome.text


def test_mpi_is_finalised_without_waiting_for_ranks_that_have_ended(tmp_path: Path) -> None:
    program = tmp_path / "finalises.py"
    program.write_text(
        "from mpi4py import MPI\n"
        "MPI.COMM_WORLD.Barrier()\n"
        "if MPI.COMM_WORLD.rank == 0:\n"
        "    MPI.Finalize()\n"
        "    print('finalised')\n"
    )
    outcome = launch(str(program))
    assert (outcome.returncode, outcome.stdout) == (0, "finalised\n"), outcome.text


@pytest.mark.parametrize(
    ("node", "end"), extent.first(2, [("on", ""), ("off", "MPI.Finalize()\n"), ("on", "MPI.Finalize()\n"), ("off", "")])
)
def test_ranks_that_free_a_communicator_and_end_do_not_hold_up_each_other(node: str, end: str, tmp_path: Path) -> None:
    program = tmp_path / "frees.py"
    program.write_text(
        "import time\n"
        "from mpi4py import MPI\n"
        "comm = MPI.COMM_WORLD\n"
        "made = [comm.Split(0) for _ in range(3)]\n"
        "for each in made:\n"
        "    each.Barrier()\n"
        "made[2].Allreduce_init(bytearray(8), bytearray(8))\n"  # it can be no spare
        "for number in (0, 2) if comm.rank else (2, 1):\n"  # two are freed by some ranks only
        "    made[number].Free()\n"
        "    time.sleep(0.3 * comm.rank)\n"
        "print('freed')\n" + end
    )
    outcome = launch("--library-calls", "0", str(program), MPICOLL_NODE=node)
    assert outcome.returncode == 0, outcome.text
    assert outcome.stdout.split() == ["freed"] * SIZE, outcome.text


@pytest.mark.parametrize("calls", ["0", "16"])
@pytest.mark.parametrize("before", ["", "solver.comm.Barrier()\nsolver.comm.allreduce(1)\n"])
def test_objects_may_make_collectives_while_python_shuts_down(calls: str, before: str, tmp_path: Path) -> None:
    program = tmp_path / "late.py"
    program.write_text(
        "import numpy as np\n"
        "from mpi4py import MPI\n"
        "class Solver:\n"
        "    def __init__(self, comm):\n"
        "        self.comm = comm\n"
        "    def __del__(self):\n"
        "        self.comm.Ibarrier().Wait()\n"
        "        total, part = self.comm.allreduce(1), self.comm.Split(0)\n"
        "        part.Allreduce(MPI.IN_PLACE, np.ones(3))\n"
        "        part.Free()\n"
        "        print(f'closed-{total}\\n', end='', flush=True)\n"
        "solver = Solver(MPI.COMM_WORLD)\n" + before
    )
    outcome = launch("--library-calls", calls, str(program))
    assert (outcome.returncode, outcome.stderr) == (0, ""), outcome.text
    assert outcome.stdout.split() == [f"closed-{SIZE}"] * SIZE, outcome.text


def test_a_program_may_give_the_name_of_all_ranks_to_others(tmp_path: Path) -> None:
    program = tmp_path / "rebound.py"
    program.write_text(
        "from mpi4py import MPI\n"
        "MPI.COMM_WORLD.free()\n"
        "world = MPI.COMM_WORLD\n"
        "assert world.allreduce(1) == world.size > 1\n"
        "MPI.COMM_WORLD = MPI.COMM_SELF\n"
        "assert world.Split(0).allreduce(1) == world.size\n"
        "if world.rank == 0:\n"
        "    raise ValueError('wrong on purpose')\n"
        "world.barrier()\n"
    )
    for options in ((), ("--native", "--profile", "--compare=0")):
        outcome = launch(*options, str(program))
        assert outcome.returncode, outcome.text
        assert "wrong on purpose" in outcome.stderr, outcome.text
        assert "mpicoll: rank 0 failed; the job ends" in outcome.stderr, outcome.text


def test_ranks_that_end_long_after_a_failed_one_do_not_wait_for_it(tmp_path: Path) -> None:
    program = tmp_path / "late.py"
    program.write_text(
        "import time\n"
        "from mpi4py import MPI\n"
        "MPI.COMM_WORLD.Barrier()\n"
        "if MPI.COMM_WORLD.rank == 1:\n"
        "    raise ValueError('wrong on purpose')\n"
        f"time.sleep({FAILED_SECONDS + 2})\n"
    )
    outcome = launch("--profile", str(program), MPICOLL_ABORT="0")
    assert "wrong on purpose" in outcome.stderr, outcome.text


LEGAL = r"""
import sys
import mpi4py
mpi4py.rc.threads = sys.argv[1] == "threads"
from mpi4py import MPI
import numpy as np

world, told = MPI.COMM_WORLD, np.zeros(1)
given, got = np.full(1 << 20, world.rank + 1.0), np.zeros(1 << 20)


def receive_while_it_runs(request):
    if world.rank == 0:
        world.Recv(told, 1)
    request.Wait()
    if world.rank == 1:
        world.Send(told, 0)


receive_while_it_runs(world.Iallreduce(given, got))
assert (got == sum(range(world.size + 1))).all()
kept = world.Allreduce_init(given, got, MPI.MAX)
for _ in range(2):
    kept.Start()
    receive_while_it_runs(kept)
kept.Free()
assert (got == world.size).all()
column = world.Split(0)
column.Barrier()
receive_while_it_runs(column.Ibcast(got, 1))
world.Allreduce(given, got)
last = world.Ibarrier()
last.Wait()
sys.stdout.write(f"{type(world).__module__} {type(last).__module__}\n")
"""
"""A program in which a rank receives from one that waits for a collective of both."""


@pytest.mark.parametrize(("threads", "requests"), [("threads", "mpicoll"), ("none", "mpi4py")])
def test_nonblocking_collectives_go_on_while_a_rank_receives(threads: str, requests: str, tmp_path: Path) -> None:
    program = tmp_path / "legal.py"
    program.write_text(LEGAL)
    outcome = launch("--library-calls", "0", "--timeout", "20", str(program), threads)
    assert outcome.returncode == 0, outcome.text
    assert re.findall(r"mpicoll\.comm (mpicoll|mpi4py)", outcome.stdout) == [requests] * SIZE, outcome.text


def test_the_profile_says_which_calls_are_the_librarys(tmp_path: Path) -> None:
    program, profile = tmp_path / "legal.py", tmp_path / "profile.json"
    program.write_text(LEGAL)
    outcome = launch("--library-calls", "0", "--compare=0", "--json", str(profile), str(program), "none")
    assert outcome.returncode == 0, outcome.text
    found = {site["call"]: site["transports"] for site in profile_in(profile)["sites"]}
    assert found["Iallreduce"] == found["Allreduce_init"] == ["MPI library"]
    assert found["Allreduce"] != ["MPI library"]
