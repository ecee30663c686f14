"""The search under mpirun, in fresh processes: the best command repeats the best trial, and a killed study goes on."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import extent
from tests.mpirun import Outcome, run

SEARCH = ("-m", "mpicoll.search")
SPACE = ("--space", "lr=log:1e-2..1", "model=mlp,logistic", "hidden=int:8..32")


def launch(size: int, *arguments: str, meanwhile: Callable[[dict[int, int]], None] | None = None) -> Outcome:
    done = run(size, arguments, timeout=120, meanwhile=meanwhile)
    assert not done.hung, done.text
    return done


def test_the_best_command_repeats_the_best_trial(tmp_path: Path) -> None:
    path, plots = tmp_path / "r.json", tmp_path / "plots"
    outputs = ("--json", str(path), "--plot", str(plots), "--no-progress")
    done = launch(4, *SEARCH, *SPACE, "--group", "2", "--trials", "5", *outputs, "--", "--epochs", "2")
    assert done.returncode == 0, done.text
    found = json.loads(path.read_text())
    lines = done.stdout.splitlines()
    assert lines[0].split()[:2] == ["trial", "state"]
    assert len([line for line in lines if " complete " in f"{line} "]) >= 5
    assert lines[-1] == found["best"]["command"]
    assert {"history.png", "parallel.png"} <= {each.name for each in plots.iterdir()}
    words = shlex.split(lines[-1])
    assert words[:3] == ["mpirun", "-n", "2"]
    alone = tmp_path / "alone.json"
    again = launch(2, *words[4:], "--quiet", "--json", str(alone))
    assert again.returncode == 0, again.text
    result = json.loads(alone.read_text())
    assert result["parameters_sha256"] == found["best"]["attributes"]["parameters_sha256"]
    assert result["test_accuracy"] == found["best"]["value"]


def killed_after(journal: Path, finished: int, rank: int) -> Callable[[dict[int, int]], None]:
    """Return a function that kills a rank when so many trials have been told."""

    def kill(pids: dict[int, int]) -> None:
        if rank in pids and journal.exists() and journal.read_text().count('"values":[') >= finished:
            with contextlib.suppress(ProcessLookupError):  # the launcher has reaped it since the last look
                os.kill(pids.pop(rank), signal.SIGKILL)
            time.sleep(0.1)

    return kill


@pytest.mark.parametrize("rank", extent.first(1, [0, 3]))
def test_a_killed_study_goes_on_and_repeats_nothing(tmp_path: Path, rank: int) -> None:
    journal, path = tmp_path / "study.journal", tmp_path / "r.json"
    words = (*SEARCH, *SPACE, "--group", "2", "--trials", "12", "--storage", str(journal), "--sampler", "random")
    fixed = ("--", "--epochs", "4", "--step-seconds", "0.005")
    first = launch(4, *words, *fixed, meanwhile=killed_after(journal, 3, rank))
    assert first.returncode != 0
    done = launch(4, *words, "--json", str(path), *fixed)
    assert done.returncode == 0, done.text
    found = json.loads(path.read_text())
    assert found["counts"]["complete"] == 12
    assert 1 <= found["counts"]["interrupted"] <= 2
    assert 0 < found["new_trials"] <= 9
    complete = [json.dumps(each["params"]) for each in found["trials"] if each["state"] == "complete"]
    assert len(set(complete)) == 12
    interrupted = [json.dumps(each["params"]) for each in found["trials"] if each["state"] == "interrupted"]
    assert all(any(text.strip("{}") in other for other in complete) for text in interrupted)


@pytest.mark.parametrize(
    ("options", "says"),
    extent.first(
        2,
        [
            ("--space lr=1..0", "error: --space lr=1..0: the range is empty"),
            ("--space rate=0..1", "error: --space rate: not an option of the trainer that a trial can choose"),
            ("--space lr=0..1 --group 3", "error: --group 3: 4 ranks cannot be divided into groups of 3"),
            ("--space lr=0..1 --epochs 0", "error: argument --epochs: '0' is not a whole number of at least 1"),
        ],
    ),
)
def test_a_wrong_option_is_one_line_on_one_rank(options: str, says: str) -> None:
    done = launch(4, *SEARCH, *options.split())
    assert done.returncode == 2
    assert [line for line in done.stderr.splitlines() if line.startswith("error: ")] == [says]
    assert "Traceback" not in done.text


def test_a_grid_has_no_more_trials_than_points() -> None:
    words = ("--space", "lr=0.1,0.2", "--sampler", "grid", "--trials", "4", "--no-progress", "--steps", "2")
    done = launch(2, *SEARCH, *words)
    assert done.returncode == 0, done.text
    lines = done.stdout.splitlines()
    assert lines[0] == "--trials 4: the grid has 2 points, and each is run once"
    assert sorted(line.split()[-1] for line in lines if " complete " in line) == ["lr=0.1", "lr=0.2"]
    assert "trials: 2 complete" in done.stdout


def test_a_study_whose_trials_all_fail_ends_with_an_error(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    done = launch(2, *SEARCH, "--space", "lr=1e6,1e7", "--trials", "2", "--epochs", "1", "--json", str(path))
    assert done.returncode == 1, done.text
    assert "error: 2 trials have failed, and none is complete" in done.stderr
    assert json.loads(path.read_text())["counts"]["failed"] == 2


def killed_when(folder: Path, generation: int) -> Callable[[dict[int, int]], None]:
    """Return a function that kills a rank when a population has been saved after so many generations."""

    def kill(pids: dict[int, int]) -> None:
        if 1 in pids and (folder / f"step-{generation:08}").exists():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids.pop(1), signal.SIGKILL)
            time.sleep(0.1)

    return kill


def test_a_killed_population_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    words = (*SEARCH, "--space", "lr=log:1e-3..1", "batch=64,128", "--population", "3", "--no-progress")
    fixed = ("--", "--epochs", "5", "--step-seconds", "0.002", "--hidden", "16")
    paths = [tmp_path / f"{number}.json" for number in range(2)]
    whole = launch(2, *words, "--json", str(paths[0]), "--plot", str(tmp_path / "plots"), *fixed)
    assert whole.returncode == 0, whole.text
    assert (tmp_path / "plots" / "population.png").exists()
    lines = whole.stdout.splitlines()
    assert lines[0].split() == ["generation", "member", "score", "parameters"]
    assert len([line for line in lines if " lr=" in f" {line.strip()}" and " batch=" in line]) >= 15
    storage = tmp_path / "population"
    stored = ("--storage", str(storage), "--json", str(paths[1]))
    first = launch(2, *words, *stored, *fixed, meanwhile=killed_when(storage, 2))
    assert first.returncode != 0
    again = launch(2, *words, *stored, *fixed)
    assert again.returncode == 0, again.text
    found = [json.loads(path.read_text()) for path in paths]
    assert found[1]["history"] == found[0]["history"]
    assert 0 < found[1]["new_generations"] < 5
    assert found[1]["best"] == found[0]["best"]
