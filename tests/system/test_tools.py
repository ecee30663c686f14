"""The commands that need MPI, as people start them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import launch

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


def test_doctor_names_a_launcher_of_another_library() -> None:
    done = run(0, "-m", "mpicoll", "doctor", "--json", PMI_SIZE="2", OMPI_COMM_WORLD_SIZE="2")
    assert done.returncode == 1
    assert "MPI4PY_LIBMPI" in facts(done)["launcher"]["cure"]


@pytest.mark.parametrize(
    ("variable", "value", "what", "says"),
    [
        ("MPICOLL_NODE", "off", "shared memory", "MPICOLL_NODE=off"),
        ("MPICOLL_ARENA", "off", "shared memory", "copies between processes"),
        ("NUMBA_DISABLE_JIT", "1", "shared memory", "JIT"),
    ],
)
def test_doctor_says_why_something_is_not_used(variable: str, value: str, what: str, says: str) -> None:
    done = run(2, "-m", "mpicoll", "doctor", "--json", **{variable: value})
    assert done.returncode == 0, done.stderr
    assert says in facts(done)[what]["value"]


def test_tune_is_used_by_what_comes_after_it(tmp_path: Path) -> None:
    cache = {"MPICOLL_CACHE_DIR": str(tmp_path)}
    done = run(2, "-m", "mpicoll", "tune", "--collective", "bcast", "--max-mb", "0", "--seconds", "0.01", **cache)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir())
    assert "measured here" in facts(run(2, "-m", "mpicoll", "doctor", "--json", **cache))["choices"]["value"]


@pytest.mark.parametrize("options", [(), ("--in-place", "--thread-level", "funneled")])
def test_the_benchmark_counts_no_wrong_elements(options: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    sizes = ("--sizes", "8", "300K", "1M", "--seconds", "0.02", "--ranks", "2", "--json", str(file))
    done = run(0, "-m", "bench.collectives", "--collective", "allreduce", *sizes, *options)
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    assert [row["wrong"] for row in result["rows"]] == [0, 0, 0]
    assert {"native", "auto", "plan", "ring", "shared"} <= set(result["rows"][0]["median"])
    assert result["metadata"]["thread_level"] == ("funneled" if options else "multiple")
    assert "geometric mean" in done.stdout


def test_the_benchmark_knows_the_other_collectives() -> None:
    done = run(0, "-m", "bench.collectives", "--sizes", "100", "40K", "--seconds", "0.02", "--ranks", "3")
    assert done.returncode == 0, done.stderr
    for collective in ("reduce", "bcast", "reduce_scatter", "allgather"):
        assert f"{collective}, " in done.stdout
