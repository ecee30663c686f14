"""The commands that need MPI, as people start them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench import launch
from bench.result_files import load_all
from mpicoll import doctor
from mpicoll.schedules import machine as machines
from tests import extent

DEADLINE = 120


def run(size: int, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = launch.command(size, arguments) if size else [sys.executable, *arguments]
    environment = {**launch.clean_environment(), **variables}
    return subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def facts(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    return {fact["what"]: fact for fact in json.loads(done.stdout)}


def test_doctor_finds_nothing_wrong_here() -> None:
    done = run(3, "-m", "mpicoll", "doctor")
    assert done.returncode == 0, done.stderr
    assert "ERROR" not in done.stdout
    assert done.stdout.count("MPI library") == 1
    assert "used; private arrays are reached by stages" in done.stdout


def test_doctor_on_one_rank_and_as_json() -> None:
    found = facts(run(0, "-m", "mpicoll", "doctor", "--json"))
    assert found["launcher"]["status"] == "note"
    assert found["atomics"]["status"] == "ok"


def test_doctor_advises_where_ranks_of_different_groups_share_cores() -> None:
    together, apart, elsewhere = [(5, 1), (5, 1)], [(5, 1), (5, 2)], [(5, 1), (6, 2)]
    assert {doctor.scheduling(groups, True).status for groups in (together, elsewhere)} == {"ok"}
    assert doctor.scheduling(apart, False).status == "ok"
    assert "sched_autogroup_enabled=0" in doctor.scheduling(apart, True).cure


def test_doctor_names_a_launcher_of_another_library() -> None:
    done = run(0, "-m", "mpicoll", "doctor", "--json", PMI_SIZE="2", OMPI_COMM_WORLD_SIZE="2")
    assert done.returncode == 1
    assert "MPI4PY_LIBMPI" in facts(done)["launcher"]["cure"]


@pytest.mark.parametrize(
    ("variable", "value", "what", "says"),
    [
        ("MPICOLL_NODE", "off", "shared memory", "MPICOLL_NODE=off"),
        ("MPICOLL_SEGMENTS", "off", "shared memory", "copies between processes"),
        ("NUMBA_DISABLE_JIT", "1", "shared memory", "JIT"),
    ],
)
def test_doctor_says_why_something_is_not_used(variable: str, value: str, what: str, says: str) -> None:
    done = run(2, "-m", "mpicoll", "doctor", "--json", **{variable: value})
    assert done.returncode == 0, done.stderr
    assert says in facts(done)[what]["value"]


def test_warmup_compiles_what_it_is_asked_for() -> None:
    done = run(0, "-m", "mpicoll", "warmup", "--compression", "sign", "topk:0.01")
    assert done.returncode == 0, done.stderr
    assert "2 compressors ready" in done.stdout
    code = (
        "from mpicoll import warmup; from mpicoll.kernels.codecs import sparse_encoding, topk; "
        "warmup.compile_item(('compressor', 'oktopk:0.01')); "
        "print([bool(each._variants) for each in (topk.largest, sparse_encoding.length_of, sparse_encoding.decode)])"
    )
    assert run(0, "-c", code).stdout == "[True, True, True]\n"
    wrong = run(0, "-m", "mpicoll", "warmup", "--compression", "int99")
    assert wrong.returncode == 2
    assert "'int99' is not one of" in wrong.stderr


@pytest.mark.parametrize("size", [0, 2])
@pytest.mark.parametrize("given", extent.first(1, ["MPICOLL_CHECK=foo", "MPICOLL_NODE=no", "MPICOLL_CORES=x"]))
def test_doctor_names_a_malformed_variable_in_one_line(size: int, given: str) -> None:
    variable, _, value = given.partition("=")
    done = run(size, "-m", "mpicoll", "doctor", **{variable: value})
    assert done.returncode == 1
    (line,) = [one for one in done.stdout.splitlines() if one.startswith("ERROR")]
    assert f"{variable}: {value!r} is not" in line
    assert "Traceback" not in done.stderr


def test_doctor_names_variables_that_do_not_exist() -> None:
    found = facts(run(0, "-m", "mpicoll", "doctor", "--json", MPICOLL_CORSE="2", MPICOLL_TEST_ALL="1"))
    assert found["variables"]["value"] == "MPICOLL_CORSE: no variable of mpicoll"
    assert found["variables"]["status"] == "note"
    assert found["variables"]["cure"] == "did you mean MPICOLL_CORES?"
    found = facts(run(0, "-m", "mpicoll", "doctor", "--json", MPICOLL_NODE="off"))
    assert "MPICOLL_NODE=off" in found["variables"]["value"]
    assert found["variables"]["status"] == "ok"


@pytest.mark.parametrize(
    "line",
    extent.first(
        4,
        [
            "train --help",
            "train --steps 3 --no-progress",
            "explain ring --size 64",
            "doctor",
            "search --help",
            "deploy --help",
            "explain ring",
        ],
    ),
)
@pytest.mark.parametrize(("closed", "status"), [(True, 141), (False, 1)])
def test_output_that_nobody_takes_is_no_traceback(line: str, closed: bool, status: int) -> None:
    words = line.split()
    own = words[0] in ("train", "search", "deploy")
    command = ["-m", f"mpicoll.{words[0]}", *words[1:]] if own else ["-m", "mpicoll", *words]
    if closed:
        reading, writing = os.pipe()
        os.close(reading)
    else:
        writing = os.open("/dev/full", os.O_WRONLY)
    try:
        done = subprocess.run(
            [sys.executable, *command],
            env=launch.clean_environment(),
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            timeout=DEADLINE,
            check=False,
        )
    finally:
        os.close(writing)
    assert done.returncode == status, done.stderr
    if closed:
        assert done.stderr == ""
    else:
        assert re.fullmatch("mpicoll.*: output could not be written: No space left on device\n", done.stderr)


@pytest.mark.parametrize("delays", [(0.5, 0.5), (0.9, 0.5), (None, 0.5)], ids=["all", "rank 1 first", "rank 1"])
def test_an_interrupt_of_ranks_is_one_line(delays: tuple[float | None, ...], tmp_path: Path) -> None:
    code = f"""
import os, signal, sys, threading
from mpi4py import MPI
from mpicoll import tune
from mpicoll.__main__ import main
delay = {delays}[MPI.COMM_WORLD.rank]
MPI.COMM_WORLD.Barrier()
if delay is not None:
    threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT)).start()
sys.exit(main(["tune"]))
"""
    done = run(2, "-c", code, MPICOLL_CACHE_DIR=str(tmp_path))
    assert done.returncode == 130
    assert done.stderr.count("interrupted") == 1
    # Rank 0 does not notice it while it waits for rank 1 in the MPI library.
    assert re.search("^mpicoll tune: (rank 1: )?interrupted\n", done.stderr, re.MULTILINE)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("variable", ["NUMBA_CACHE_DIR", "MPICOLL_CACHE_DIR"])
def test_warmup_needs_a_folder_to_keep_kernels(variable: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    variables = {variable: str(file / "cache")}
    if variable == "MPICOLL_CACHE_DIR":  # it counts where the sources' folder cannot be written
        code = (
            "import sys, pathlib; from mpicoll.kernels import machine_code; from mpicoll import warmup; "
            f"machine_code._FOLDER = pathlib.Path({str(file)!r}); sys.exit(warmup.main(['--compression']))"
        )
        done = run(0, "-c", code, **variables)
    else:
        done = run(0, "-m", "mpicoll", "warmup", "--compression", **variables)
    assert done.returncode == 1
    assert str(file / "cache" / "") in done.stderr
    assert "NUMBA_CACHE_DIR" in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def children(process: int) -> list[int]:
    """Return the processes that a process has started, apart from those that have ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            if int(parent) == process and state != "Z":
                found.append(int(path.parent.name))
    return found


def wait_until(condition: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.05)


@pytest.mark.parametrize("way", ["interrupt of a terminal", "interrupt", "kill"])
def test_warmup_ends_with_its_processes(way: str, tmp_path: Path) -> None:
    # Programs that a shell has started in the background ignore interrupts, and so do those that they start.
    code = (
        "import signal, sys; from mpicoll.__main__ import main; "
        "signal.signal(signal.SIGINT, signal.default_int_handler); sys.exit(main(['warmup', '--processes', '2']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**launch.clean_environment(), "NUMBA_CACHE_DIR": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        wait_until(lambda: any(tmp_path.rglob("*.lock")), "a process compiles")
        started = children(process.pid)
        assert len(started) > 1
        if way == "interrupt of a terminal":
            os.killpg(process.pid, signal.SIGINT)
        else:
            process.send_signal(signal.SIGINT if way == "interrupt" else signal.SIGKILL)
        wait_until(lambda: not any(Path(f"/proc/{each}/exe").exists() for each in started), "the processes end")
        errors = process.communicate(timeout=DEADLINE)[1]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if way != "kill":
        assert process.returncode == 130
        assert errors == "mpicoll warmup: interrupted; what is compiled is kept\n"


def test_tune_is_used_by_what_comes_after_it(tmp_path: Path) -> None:
    cache = {"MPICOLL_CACHE_DIR": str(tmp_path)}
    done = run(2, "-m", "mpicoll", "tune", "--collective", "bcast", "--max-mb", "0", "--seconds", "0.01", **cache)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir())
    assert "measured here" in facts(run(2, "-m", "mpicoll", "doctor", "--json", **cache))["choices"]["value"]


@pytest.mark.parametrize("line", ["tune --seconds 9", "predict --fit", "predict --fit --save"])
def test_what_could_not_be_written_is_not_measured(line: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    place = str(file / "kept")
    saves = line.endswith("--save")
    words = [*line.split(), *([place] if saves else [])]
    begun = time.monotonic()
    done = run(2, "-m", "mpicoll", *words, MPICOLL_CACHE_DIR=str(tmp_path) if saves else place)
    assert done.returncode == 2
    assert time.monotonic() - begun < 30
    named = "--save" if saves else "MPICOLL_CACHE_DIR"
    (said,) = [one for one in done.stderr.splitlines() if one.startswith("mpicoll ")]
    assert said.startswith(f"mpicoll {words[0]}: {named}: {place!r}" if saves else f"mpicoll {words[0]}: {named}: ")
    assert place in said
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("options", extent.first(1, [("--in-place", "--thread-level", "funneled"), ()]))
def test_the_benchmark_counts_no_wrong_elements(options: tuple[str, ...], tmp_path: Path) -> None:
    sizes = ("--sizes", "8", "300K", "--seconds", "0.02", "--ranks", "2", "--launches", "2")
    files = ("--output", str(tmp_path), "--csv", str(tmp_path / "all.csv"))
    done = run(0, "-m", "bench.collectives", "--collective", "allreduce", *sizes, *files, *options)
    assert done.returncode == 0, done.stderr
    launches = load_all([tmp_path])
    assert len(launches) == 2
    for one in launches:
        assert one.wrong == 0
        names = {result.contender for result in one.results if result.case.nbytes == 8}
        assert {"native", "auto", "plan", "ring", "shared"} <= names
        assert one.metadata["thread_level"] == ("funneled" if options else "multiple")
        assert all(result.samples.size >= 7 for result in one.results)
    assert "geometric mean" in done.stdout
    lines = (tmp_path / "all.csv").read_text().splitlines()
    assert len(lines) == 1 + sum(len(launch.results) for launch in launches)


def test_wrong_results_are_a_failure(tmp_path: Path) -> None:
    done = run(0, "-m", "tests.system.programs.wrong_benchmark", "--seconds", "0.02", "--output", str(tmp_path))
    assert done.returncode == 1, done.stderr
    wrong = {result.contender: result.wrong for result in load_all([tmp_path])[0].results}
    assert wrong["auto"] == 3
    assert wrong["native"] == 0


def test_the_benchmark_knows_the_other_collectives() -> None:
    options = ("--sizes", "40K", "--seconds", "0.01", "--ranks", "2", "--calls", "back-to-back")
    done = run(0, "-m", "bench.collectives", *options)
    assert done.returncode == 0, done.stderr
    for collective in ("reduce", "bcast", "reduce_scatter", "allgather"):
        assert f"{collective}, " in done.stdout


@pytest.mark.parametrize("program", ["overlap", "kernels"])
def test_the_other_benchmarks_run(program: str, tmp_path: Path) -> None:
    options = ("--sizes", "4K", "--seconds", "0.02", "--output", str(tmp_path))
    done = run(0, "-m", f"bench.{program}", *options, *(("--ranks", "2") if program == "overlap" else ()))
    assert done.returncode == 0, done.stderr
    (launch,) = load_all([tmp_path])
    assert launch.wrong == 0
    shares = [result.detail["overlap"] for result in launch.results if "overlap" in result.detail]
    assert len(shares) == (3 if program == "overlap" else 0)
    assert all(0 <= share <= 1 for share in shares)


def test_compressed_allreduces_are_compared(tmp_path: Path) -> None:
    options = ("--sizes", "100K", "--seconds", "0.02", "--ranks", "3", "--output", str(tmp_path))
    done = run(0, "-m", "bench.compression", "--compression", "int8", "sign:block=64", *options)
    assert done.returncode == 0, done.stderr
    (launch,) = load_all([tmp_path])
    assert launch.wrong == 0
    details = {result.contender: result.detail for result in launch.results}
    assert details["native"]["rms error"] < 1e-6
    assert 3.9 < details["int8"]["payload"] < 4
    assert 1e-3 < details["int8"]["rms error"] < 3e-2
    assert "21.3x" in done.stdout
    done = run(0, "-m", "bench.compression", "--compression", "int88")
    assert done.returncode == 2
    assert "'int88' is not one of" in done.stderr


@pytest.mark.parametrize(("ranks", "variables"), extent.first(1, [(4, {"MPICOLL_NODES": "2"}), (2, {})]))
def test_a_machine_is_fitted_validated_and_used(ranks: int, variables: dict[str, str], tmp_path: Path) -> None:
    cache = {"MPICOLL_CACHE_DIR": str(tmp_path), **variables}
    done = run(ranks, "-m", "mpicoll", "predict", "--fit", "--seconds", "0.2", **cache)
    assert done.returncode == 0, done.stderr
    machine = machines.load(tmp_path / "machine.json")
    assert machine.fitted is not None
    assert max(machine.fitted.ranks) == ranks
    assert machine.fitted.nodes == (2 if variables else 1)
    assert {point.ranks for point in machine.shared} == {2}
    assert "other lengths: median error" in done.stdout
    assert ("other lengths and numbers of ranks" in done.stdout) == (ranks == 4)
    assert ("hierarchy" in done.stdout) == bool(variables)
    found = run(0, "-m", "mpicoll", "predict", "--size", str(ranks), "--ranks-per-node", "2", "--nbytes", "4K", **cache)
    assert f"measured on {ranks} ranks" in found.stdout
    assert "*" not in found.stdout


def test_one_rank_or_too_little_time_is_an_error(tmp_path: Path) -> None:
    cache = {"MPICOLL_CACHE_DIR": str(tmp_path)}
    assert run(0, "-m", "mpicoll", "predict", "--fit", **cache).returncode == 1
    done = run(2, "-m", "mpicoll", "predict", "--fit", "--deadline", "0.01", **cache)
    assert done.returncode != 0
    assert "has not ended within" in done.stderr
    kept = [path.name for path in tmp_path.iterdir()]
    assert not [name for name in kept if not name.startswith("method-times-")]
