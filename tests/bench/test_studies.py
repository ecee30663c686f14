"""Studies: results that are kept, runs that are not repeated, and pages that say what the results say."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from bench import launch
from bench.studies import __main__ as command
from bench.studies import compressor_choice, distillation_task, distilled_students, link_rates, run_worker, study_task
from bench.studies.distillation_task import ALONE, DISTILLED, TEACHER
from bench.studies.run_scheduler import pending, planned, run_all
from bench.studies.study_definition import accuracy_cell, median_curve
from bench.studies.study_pages import draw, method_page, outcomes_of, page_of
from bench.studies.study_runs import CHANCE, StudyError, StudyOutcome, StudyRun, append, load, read_runs, write_runs
from mpicoll import Intracomm
from mpicoll.data.datasets import load as load_samples
from mpicoll.train.config import MODES, OPTIMIZERS, TrainConfig
from tests.test_layers import REPOSITORY

STUDIES = command.STUDIES
PAGES = REPOSITORY / "docs" / "studies"
RUN = StudyRun("sign", "64", 1, 2, {"batch": 64, "hidden": (8, 8), "slow": ((1, 5.0),)})


def outcome(run, accuracy=0.9, **more):
    curve = [[5, 1.0, accuracy]]
    values = {"steps": 5, "seconds": 1.0, "samples_per_second": 9.0, "sent_nbytes": 100.0, "curve": curve, **more}
    return StudyOutcome(run, accuracy=accuracy, **values)


def test_outcomes_survive_a_file(tmp_path):
    path, kept = tmp_path / "r.jsonl", outcome(RUN, distances=[[63, 0.5]], late=2.0)
    append(path, kept)
    append(path, outcome(replace(RUN, seed=2), diverged="the loss became nan"))
    found = load(path)
    assert found[RUN.key] == kept
    assert list(found) == [RUN.key, replace(RUN, seed=2).key]
    assert load(tmp_path / "none.jsonl") == {}
    write_runs(tmp_path / "runs.json", [RUN])
    assert read_runs(tmp_path / "runs.json") == [RUN]


def test_a_line_that_was_not_finished_is_removed(tmp_path):
    path = tmp_path / "r.jsonl"
    append(path, outcome(RUN))
    whole = path.read_text()
    path.write_text(whole + whole[:40])
    assert set(load(path)) == {RUN.key}
    assert path.read_text() == whole


def change(line, name, value):
    record = json.loads(line)
    record[name] = value
    return json.dumps(record)


@pytest.mark.parametrize(
    "damage",
    [
        lambda line: "{}",
        lambda line: line[:-20],
        lambda line: change(line, "accuracy", 1.5),
        lambda line: change(line, "seconds", None),
        lambda line: change(line, "run", {"variant": 3}),
        lambda line: change(line, "more", 1),
        lambda line: "[1]",
    ],
)
def test_a_damaged_line_is_named(tmp_path, damage):
    path = tmp_path / "r.jsonl"
    append(path, outcome(RUN))
    line = path.read_text().strip()
    path.write_text(f"{line}\n{damage(line)}\n")
    with pytest.raises(StudyError, match=r"r\.jsonl, line 2"):
        load(path)


def test_finished_runs_are_not_repeated(tmp_path, monkeypatch):
    path = tmp_path / "r.jsonl"
    runs = [replace(RUN, seed=seed, ranks=2 + seed % 2) for seed in range(5)]
    append(path, outcome(runs[2]))
    assert pending(runs, path) == [runs[0], runs[1], runs[3], runs[4]]
    started = []
    monkeypatch.setattr(
        "bench.studies.run_scheduler._launch", lambda here, *place: started.append((list(here), place[1]))
    )
    run_all(runs, path)
    assert started == [([runs[0], runs[4]], 2), ([runs[1], runs[3]], 3)]
    changed = replace(RUN, seed=2, options={**RUN.options, "batch": 65})
    assert pending([changed], path) == [changed]


@pytest.mark.parametrize("name", [name for name in STUDIES if name != "distillation"])
def test_runs_are_runs_of_the_trainer(name):
    runs = STUDIES[name].runs(3)
    assert len({run.key for run in runs}) == len(runs) > 3
    for run in runs:
        config = TrainConfig(dataset="clouds", seed=run.seed, **run.options)
        assert config.mode in MODES
        assert config.optimizer in OPTIMIZERS
        assert config.servers < run.ranks
        assert run.seed == 3


def test_a_run_that_is_stopped_is_no_result(tmp_path, monkeypatch, capsys):
    run = StudyRun("dense", "", 0, 1, {"hidden": (4,), "batch": 64, "steps": 400, "epochs": 2})
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "1")  # which the worker sets if nobody has
    monkeypatch.setattr(study_task._ReplicaObserver, "began", lambda observer, loop: loop.ask_to_stop())  # as SIGTERM
    write_runs(tmp_path / "runs.json", [run])
    assert run_worker.main([str(tmp_path / "runs.json"), str(tmp_path / "r.jsonl")]) == 1
    assert not load(tmp_path / "r.jsonl")
    assert "dense, seed 0: was stopped after" in capsys.readouterr().err


def processes_of(folder):
    """Return the processes whose command line names a file in a folder, the program itself excepted."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (path / "cmdline").read_bytes()
            if f"{folder}/".encode() in words:
                found[int(path.name)] = words.replace(b"\0", b" ").decode()
    return found


def wait_for(condition, seconds=60.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_no_rank_is_left_after_sigterm(tmp_path):
    words = ["-m", "bench.studies", "--only", "batch-size", "--seeds", "1", "--output", str(tmp_path)]
    environment = {**launch.clean_environment(), "PYTHONPATH": str(REPOSITORY)}
    program = subprocess.Popen([sys.executable, *words], env=environment, cwd=REPOSITORY)
    try:
        wait_for(lambda: sum("run_worker" in words for words in processes_of(tmp_path).values()) > 1)
        program.send_signal(signal.SIGTERM)
        assert program.wait(30) == 128 + signal.SIGTERM
        assert processes_of(tmp_path) == {}
    finally:
        program.kill()
        for process in processes_of(tmp_path):
            os.kill(process, signal.SIGKILL)


def test_steps_at_equal_bytes_follow_from_the_first_seed(tmp_path):
    study, path = STUDIES["compressors"], tmp_path / "r.jsonl"
    first = planned(study, 2, path, quick=False)
    assert {run.group for run in first} == {compressor_choice.AT_STEPS}
    for run in first:
        sent = 1000.0 if run.variant == "dense" else 100.0 if run.seed == 0 else 7.0
        append(path, outcome(run, sent_nbytes=sent))
    runs = planned(study, 2, path, quick=False)
    follow = runs[len(first) :]
    assert len(follow) == len(first)
    steps = {(run.variant == "dense"): run.options["steps"] for run in follow}
    assert steps == {True: compressor_choice.DENSE_STEPS, False: 10 * compressor_choice.DENSE_STEPS}
    assert all(run.options["epochs"] * 128 >= run.options["steps"] for run in follow)


def test_students_have_equal_choices(tmp_path):
    runs = STUDIES["distillation"].runs(3)
    for group in distilled_students.TASKS:
        own = [run for run in runs if run.group == group]
        by_variant = {name: [run.options for run in own if run.variant == name] for name in distillation_task.VARIANTS}
        assert len(by_variant[TEACHER]) == 1
        decays = {name: {each["weight_decay"] for each in by_variant[name]} for name in (ALONE, DISTILLED)}
        assert decays[ALONE] == decays[DISTILLED] == set(distilled_students.DECAYS)
        assert max(each["epochs"] for each in by_variant[ALONE]) > max(each["epochs"] for each in by_variant[DISTILLED])
        assert len({run.key for run in own}) == len(own)
    quick = planned(STUDIES["distillation"], 1, tmp_path / "none", quick=True)
    assert {run.options["epochs"] for run in quick} == {1}
    assert len({run.key for run in quick}) == len(quick)


def student(variant, decay, seed, validation, test):
    options = {"weight_decay": decay, "alpha": 0.9 if variant == DISTILLED else 0.0, "temperature": 2, "epochs": 9}
    run = StudyRun(variant, "digits", seed, 2, options)
    return StudyOutcome(run, accuracy=test, validation=validation, parameters=100 if variant == TEACHER else 20)


STUDENTS = [
    *(student(TEACHER, 0.0, seed, 0.97, 0.96) for seed in (0, 1)),
    *(student(ALONE, 0.1, seed, 0.90, 0.90) for seed in (0, 1)),
    student(DISTILLED, 0.1, 0, 0.91, 0.99),
    student(DISTILLED, 0.1, 1, 0.91, 0.99),
    student(DISTILLED, 0.2, 1, 0.99, 0.93),
    student(DISTILLED, 0.2, 0, 0.89, 0.91),
]


def test_settings_of_students_are_chosen_by_all_seeds_and_not_by_test_samples():
    found = distilled_students.best(STUDENTS, DISTILLED, "digits")
    assert [(each.run.options["weight_decay"], each.run.seed) for each in found] == [(0.2, 0), (0.2, 1)]


def test_gains_of_students_are_those_of_equal_seeds():
    assert distilled_students.gains(STUDENTS, "digits") == [pytest.approx(1.0), pytest.approx(3.0)]
    lines = "\n".join(distilled_students.tables(STUDENTS))
    assert "92.00 [91.00, 93.00]" in lines
    assert "+2.00 [+1.00, +3.00]" in lines
    assert "T = 2, weight 0.9, weight decay 0.2, 9 epochs" in lines


def test_no_sample_of_a_student_is_in_two_parts():
    whole = load_samples(TrainConfig(dataset="digits", seed=3), Intracomm(MPI.COMM_SELF))
    fit, validation = distillation_task.divided(whole, 3)

    def rows(samples):
        x, _ = samples.batch(np.arange(samples.count))
        return [row.tobytes() for row in x]

    parts = [rows(part) for part in (fit.train, validation.test, whole.test)]
    assert sorted(parts[0] + parts[1]) == sorted(rows(whole.train))
    assert fit.test is whole.test
    assert len(parts[1]) == round(0.25 * whole.train.count)


def test_quick_runs_are_short_and_have_keys_of_their_own(tmp_path):
    study = STUDIES["batch-size"]
    quick, whole = (planned(study, 1, tmp_path / "none", quick=each) for each in (True, False))
    assert {run.options["steps"] for run in quick} == {3}
    assert not {run.key for run in quick} & {run.key for run in whole}


def test_cells():
    runs = [outcome(replace(RUN, seed=seed), 0.9 + 0.01 * seed) for seed in range(5)]
    assert accuracy_cell(runs) == "92.00 [90.00, 94.00]"
    assert accuracy_cell(runs[:1]) == "90.00"
    assert accuracy_cell([]) == ""
    lost = [replace(each, accuracy=CHANCE, diverged="nan") for each in runs]
    assert accuracy_cell(lost) == "diverged"
    assert accuracy_cell([*runs[1:], lost[0]]) == "92.00 [10.00, 94.00] (1 diverged)"
    longer = replace(runs[0], curve=[[5, 3.0, 0.5], [9, 4.0, 0.6]])
    assert median_curve([longer, runs[4]], "curve", 2) == ([5], [pytest.approx(0.72)])
    assert link_rates.seconds_to_goal(replace(longer, curve=[[1, 2.0, 0.89], [2, 4.5, 0.9]])) == 4.5
    assert link_rates.seconds_to_goal(longer) is None


def rated(gbit, seconds, variant=link_rates.DENSE):
    """Return the outcome of a run of which a worker sends 1 Gbit."""
    run = StudyRun(variant, f"{gbit:g} Gbit/s", 0, 4, {}, gbit)
    return outcome(run, seconds=seconds, sent_nbytes=0.2e9 / 8)


def test_seconds_are_left_out_where_faster_links_seem_to_take_longer():
    runs = [rated(0.1, 12.0), rated(1.0, 3.0), rated(10.0, 3.5), rated(100.0, 2.0)]
    assert link_rates.timed_groups(runs) == ["0.1 Gbit/s", "1 Gbit/s"]
    lines = link_rates.tables(runs)
    assert "10 Gbit/s: seconds are left out, since other programs slowed these runs." in lines
    assert sum("seconds to 90%" in line for line in lines) == 2


def test_a_page_says_where_links_do_not_take_the_time():
    runs = [rated(1.0, 3.0), rated(1.0, 2.5, "gossip"), rated(10.0, 2.5), rated(10.0, 2.0, "gossip")]
    lines = link_rates.tables(runs)
    assert "1 Gbit/s:" in lines
    told = next(line for line in lines if line.startswith("10 Gbit/s"))
    assert told.startswith("10 Gbit/s: a link is busy for at most 5% of a run. Computation and the start of calls")
    assert sum("seconds to 90%" in line for line in lines) == 2


# ---- the published pages --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STUDIES)
def test_published_pages_are_written_from_the_published_results(name):
    study, results = STUDIES[name], PAGES / f"{name}.jsonl"
    outcomes = outcomes_of(study, planned(study, 5, results, quick=False), results)
    assert (PAGES / f"{name}.md").read_text(encoding="utf-8") == page_of(study, outcomes)
    assert len({each.run.seed for each in outcomes}) == 5
    assert not pending(planned(study, 5, results, quick=False), results)
    assert study.conclusions


def test_the_page_on_the_method_is_current():
    assert (PAGES / "method.md").read_text(encoding="utf-8") == method_page(list(STUDIES.values()))


@pytest.mark.parametrize("name", STUDIES)
def test_plots_are_drawn(name, tmp_path):
    pytest.importorskip("matplotlib")
    study, results = STUDIES[name], PAGES / f"{name}.jsonl"
    outcomes = outcomes_of(study, planned(study, 5, results, quick=False), results)
    draw(study, outcomes, tmp_path / "plot.svg")
    assert "</svg>" in (tmp_path / "plot.svg").read_text()


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", ["--seeds 0", "--only none", "--output /dev/null/x"])
def test_wrong_arguments(words, capsys):
    with pytest.raises(SystemExit) as caught:
        command.main(words.split())
    assert caught.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_a_study_without_results_is_an_error(tmp_path, capsys):
    assert command.main(["--only", "batch-size", "--pages-only", "--output", str(tmp_path)]) == 1
    assert "has no results of this study" in capsys.readouterr().err


def test_a_launch_that_fails_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr("bench.studies.run_scheduler.launch.command", lambda ranks, arguments: ["false"])
    with pytest.raises(StudyError, match="a launch on 2 ranks ended with exit status 1"):
        run_all([RUN], tmp_path / "r.jsonl")
