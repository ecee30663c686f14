"""Studies on groups of ranks: each trial once, failures alone, the same values on all ranks of a group."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from mpi4py import MPI

from mpicoll import Intracomm
from mpicoll.data.datasets import load
from mpicoll.errors import NonFiniteLoss, SearchError, UsageError
from mpicoll.search import StudyResult, Trial, TrialPruned, group_trial, run, trainer_objective
from mpicoll.search import coordinator_messages as messages
from mpicoll.search.coordinator import StudyCoordinator
from mpicoll.search.search_space import parse_space
from mpicoll.search.study_storage import journal
from mpicoll.search.trainer_objective import TrainerObjective
from mpicoll.search.trial_execution import Interrupted
from mpicoll.train.assembly import make_communicator
from mpicoll.train.training_run import run as train

pytestmark = pytest.mark.mpi
WORLD = MPI.COMM_WORLD
OPTIONS: dict[str, Any] = {"sampler": "random", "timeout": 20.0}


@pytest.fixture(scope="module", autouse=True)
def _quietly() -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)


def group_size() -> int:
    """Return the size of groups of which there are several if possible."""
    return next((size for size in (2, 3) if WORLD.size % size == 0), 1)


def quadratic(trial: Trial, comm: Intracomm) -> float:
    x = trial.suggest_float("x", -2, 2)
    n = trial.suggest_int("n", 1, 3)
    kind = trial.suggest_categorical("kind", ["a", "b", None])
    found = comm.allgather((x, n, kind, trial.number))
    assert found == found[:1] * comm.size
    total = np.array([x])
    comm.Allreduce(MPI.IN_PLACE, total)
    return float(total[0] / comm.size) ** 2 + n


def failed(result: StudyResult) -> list[str]:
    assert result.study is not None
    return [each.user_attrs["reason"] for each in result.study.trials if each.state.name == "FAIL"]


@pytest.mark.parametrize("group", sorted({1, group_size(), WORLD.size}))
@pytest.mark.parametrize("threaded", [True, False])
def test_every_trial_is_run_once(comm: Intracomm, group: int, threaded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    level = MPI.Query_thread() if threaded else MPI.THREAD_SERIALIZED
    monkeypatch.setattr(messages, "thread_level", lambda: level)
    told: list[int] = []
    result = run(
        quadratic, trials=12, comm=comm, group=group, told=lambda record: told.append(record.number), **OPTIONS
    )
    assert result.counts == {"complete": 12, "pruned": 0, "failed": 0, "interrupted": 0}
    assert (
        comm.allgather((result.best_value, result.best_params)) == [(result.best_value, result.best_params)] * comm.size
    )
    assert (result.study is None) == (comm.rank > 0)
    if result.study is not None:
        assert sorted(told) == list(range(12))
        trials = result.study.trials
        assert result.best_value == min(trial.value for trial in trials) == trials[result.best_number].value
        assert all(trial.value == pytest.approx(trial.params["x"] ** 2 + trial.params["n"]) for trial in trials)
        assert {trial.user_attrs["group"] for trial in trials} <= set(range(comm.size // group))
        assert 0 < result.busy <= 1


def raise_on_last(error: Exception) -> Callable[[Trial, Intracomm], float]:
    """Return an objective whose trial 2 fails on one rank while the others are in a collective."""

    def objective(trial: Trial, comm: Intracomm) -> float:
        trial.suggest_float("x", 0, 1)
        if trial.number == 2 and comm.rank == comm.size - 1:
            raise error
        comm.Barrier()
        return float(comm.allreduce(trial.params["x"]))

    return objective


@pytest.mark.parametrize("group", sorted({group_size(), WORLD.size}))
def test_a_trial_that_raises_on_one_rank_fails_alone(comm: Intracomm, group: int) -> None:
    result = run(raise_on_last(ZeroDivisionError("by nothing")), trials=8, comm=comm, group=group, **OPTIONS)
    assert result.counts == {"complete": 7, "pruned": 0, "failed": 1, "interrupted": 0}
    if result.study is not None:
        assert failed(result) == [f"rank {group - 1} of the group: ZeroDivisionError: by nothing"]


@pytest.mark.parametrize("value", [np.nan, np.inf, None, "text"])
def test_a_value_that_is_no_number_fails(comm: Intracomm, value: Any) -> None:
    def objective(trial: Trial, comm: Intracomm) -> Any:
        return value if trial.number == 1 else trial.suggest_float("x", 0, 1)

    result = run(objective, trials=4, comm=comm, group=group_size(), **OPTIONS)
    assert (result.counts["complete"], result.counts["failed"]) == (3, 1)
    if result.study is not None:
        assert str(value) in failed(result)[0]


def test_errors_of_all_ranks_and_wrong_suggestions(comm: Intracomm) -> None:
    def objective(trial: Trial, comm: Intracomm) -> float:
        if trial.number == 0:
            raise NonFiniteLoss("the loss became nan in step 3")
        if trial.number == 1:
            trial.suggest_float("x", 2, 1)
        if trial.number == 2:
            trial.set_user_attr("array", np.zeros(3))
        return trial.suggest_float("x", 0, 1)

    result = run(objective, trials=6, comm=comm, group=group_size(), **OPTIONS)
    assert (result.counts["complete"], result.counts["failed"]) == (3, 3)
    if result.study is not None:
        reasons = " | ".join(failed(result))
        assert "NonFiniteLoss: the loss became nan in step 3" in reasons
        assert "ValueError" in reasons
        assert "TypeError" in reasons


def test_ranks_that_ask_for_different_things(comm: Intracomm) -> None:
    if group_size() == 1:
        pytest.skip("groups of one rank agree")

    def objective(trial: Trial, comm: Intracomm) -> float:
        high = 2.0 if trial.number == 1 and comm.rank else 1.0
        return trial.suggest_float("x", 0, high)

    result = run(objective, trials=4, comm=comm, group=group_size(), **OPTIONS)
    assert (result.counts["complete"], result.counts["failed"]) == (3, 1)
    if result.study is not None:
        assert "MismatchError: trial: this rank asked for" in failed(result)[0]


def test_pruning_is_decided_alike_on_all_ranks(comm: Intracomm) -> None:
    def objective(trial: Trial, comm: Intracomm) -> float:
        x = trial.suggest_float("x", 0, 1)
        for step in range(1, 10):
            trial.report(x, step)
            gives_up = trial.should_prune()
            assert comm.allgather(gives_up) == [gives_up] * comm.size
            if gives_up:
                raise TrialPruned if trial.number % 2 else optuna.TrialPruned
        return x

    result = run(objective, trials=16, comm=comm, group=group_size(), pruner="asha", **OPTIONS)
    assert result.counts["pruned"] > 3
    assert result.counts["complete"] + result.counts["pruned"] == 16
    if result.study is not None:
        steps = {len(each.intermediate_values) for each in result.study.trials if each.state.name == "PRUNED"}
        assert steps <= {1, 3, 9}


@pytest.mark.parametrize("pause", [0.0, 0.02])
def test_reports_that_nobody_decides_on_are_kept(
    comm: Intracomm, monkeypatch: pytest.MonkeyPatch, pause: float
) -> None:
    """Reports travel with the end of a trial, or before it without a reply."""
    monkeypatch.setattr(group_trial, "_REPORT_SECONDS", 0.01)

    def objective(trial: Trial, comm: Intracomm) -> float:
        for step in range(1, 6):
            trial.report(trial.number + step / 10, step)
            assert not trial.should_prune()
            time.sleep(pause)
        if comm.rank == 0:
            with pytest.raises(ValueError, match="step: -1"):
                trial.report(0.0, -1)
        return trial.suggest_float("x", 0, 1)

    result = run(objective, trials=7, comm=comm, group=group_size(), **OPTIONS)
    assert result.counts["complete"] == 7
    if result.study is not None:
        for trial in result.study.trials:
            assert trial.intermediate_values == {step: trial.number + step / 10 for step in range(1, 6)}


@pytest.mark.parametrize(
    ("sampler", "pruner"), [("tpe", "median"), ("cmaes", "hyperband"), ("random", "asha"), ("tpe", "none")]
)
def test_samplers_and_pruners(comm: Intracomm, sampler: str, pruner: str) -> None:
    def objective(trial: Trial, comm: Intracomm) -> float:
        x, y = trial.suggest_float("x", -5, 5), trial.suggest_float("y", -5, 5)
        for step in range(1, 4):
            trial.report(x**2 + y**2, step)
            if trial.should_prune():
                raise TrialPruned
        return x**2 + y**2

    options = {**OPTIONS, "sampler": sampler, "pruner": pruner}
    result = run(objective, trials=25, comm=comm, group=group_size(), **options)
    assert result.counts["complete"] + result.counts["pruned"] == 25
    assert (result.counts["pruned"] > 0) == (pruner != "none")
    assert result.best_value < 5


def test_a_study_of_the_programs_own(comm: Intracomm) -> None:
    study = optuna.create_study(direction="maximize") if comm.rank == 0 else None
    result = run(quadratic, study, comm, trials=5, **OPTIONS)
    assert result.study is study
    assert result.best_value == comm.bcast(study.best_value if study is not None else None)


def test_a_study_that_cannot_go_on_ends_on_all_ranks(comm: Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(StudyCoordinator, "_end", full)
    with pytest.raises(SearchError, match="No space left"):
        run(quadratic, trials=6, comm=comm, group=group_size(), **OPTIONS)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"group": 1 + WORLD.size}, "ranks cannot be divided"),
        ({"group": 0}, "--group 0"),
        ({"trials": None}, "--trials"),
        ({"trials": 0}, "--trials 0"),
        ({"direction": "up"}, "--direction up"),
        ({"sampler": "x"}, "--sampler x"),
        ({"pruner": "x"}, "--pruner x"),
        ({"storage": "/no/such/folder/file"}, "No such file"),
        ({"timeout": 0}, "--timeout 0"),
    ],
)
def test_wrong_arguments(comm: Intracomm, options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        run(quadratic, comm=comm, **{**OPTIONS, "trials": 2, **options})


# ---- storage --------------------------------------------------------------------------------------------------------


def test_a_study_goes_on_where_it_was_interrupted(comm: Intracomm, shared_folder: Path) -> None:
    path = str(shared_folder / "journal")
    first = run(quadratic, trials=5, comm=comm, storage=path, **OPTIONS)
    lost: dict[str, Any] = {}
    if comm.rank == 0:  # a job that is killed leaves a trial that is running, and perhaps half a line
        with journal(path) as storage:
            trial = optuna.load_study(study_name="study", storage=storage).ask()
            lost = {"x": trial.suggest_float("x", -2, 2), "n": trial.suggest_int("n", 1, 3)}
        with Path(path).open("ab") as stream:
            stream.write(b'{"op_code": 5, "wor')
    again = run(quadratic, trials=9, comm=comm, storage=path, **OPTIONS)
    assert (first.new_trials, again.new_trials) == (5, 4)
    assert run(quadratic, trials=9, comm=comm, storage=path, **OPTIONS).new_trials == 0
    assert again.counts == {"complete": 9, "pruned": 0, "failed": 0, "interrupted": 1}
    if again.study is not None:
        trials = again.study.trials
        assert [trial.number for trial in trials] == list(range(10))
        repeated = next(trial for trial in trials if trial.user_attrs.get("repeats") == 5)
        assert {name: repeated.params[name] for name in lost} == lost
        complete = [trial.params["x"] for trial in trials if trial.state.name == "COMPLETE"]
        assert len(set(complete)) == 9


def test_a_study_that_is_asked_to_stop_ends_and_goes_on(comm: Intracomm, shared_folder: Path) -> None:
    path, stopping = str(shared_folder / "journal"), True

    def objective(trial: Trial, comm: Intracomm) -> float:
        x = trial.suggest_float("x", 0, 1)
        comm.Barrier()
        if stopping and trial.number == 3:
            raise Interrupted
        return x

    result = run(objective, trials=2000, comm=comm, group=group_size(), storage=path, **OPTIONS)
    assert result.counts["interrupted"] == 1
    assert result.counts["complete"] < 2000
    stopping, wanted = False, result.counts["complete"] + 4
    again = run(objective, trials=wanted, comm=comm, group=group_size(), storage=path, **OPTIONS)
    assert (again.counts["complete"], again.counts["interrupted"]) == (wanted, 1)
    if again.study is not None:
        x = [trial.params["x"] for trial in again.study.trials if trial.state.name == "COMPLETE"]
        assert again.study.trials[3].params["x"] in x
        assert len(set(x)) == wanted


def test_a_grid_goes_on(comm: Intracomm, shared_folder: Path) -> None:
    path = str(shared_folder / "journal")
    points = [{"x": float(x), "n": n, "kind": "a"} for x in (-1, 0, 1) for n in (1, 2)]
    assert run(quadratic, trials=4, grid=points, comm=comm, storage=path, **OPTIONS).new_trials == 4
    result = run(quadratic, grid=points, comm=comm, storage=path, **OPTIONS)
    assert (result.new_trials, result.counts["complete"]) == (2, 6)
    assert result.best_params == {"x": 0.0, "n": 1, "kind": "a"}
    if result.study is not None:
        assert sorted(map(str, points)) == sorted(str(trial.params) for trial in result.study.trials)


def test_a_grid_ends_after_every_point(comm: Intracomm) -> None:
    points = [{"x": float(x), "n": 1, "kind": "a"} for x in (-1, 1)]
    result = run(quadratic, trials=5, grid=points, comm=comm, **{**OPTIONS, "sampler": "grid"})
    assert (result.new_trials, result.counts["complete"]) == (2, 2)
    more = run(quadratic, trials=5, grid=points, comm=comm, **OPTIONS)
    assert more.counts["complete"] == 5


def test_storage_that_is_something_else_or_in_use(comm: Intracomm, shared_folder: Path) -> None:
    path = shared_folder / "journal"
    if comm.rank == 0:
        path.write_text("something else\nand more")
    with pytest.raises(UsageError, match="not a journal"):
        run(quadratic, trials=1, comm=comm, storage=str(path), **OPTIONS)
    if comm.rank == 0:
        assert path.read_text() == "something else\nand more"
        path.write_text('{"op_code": 0, "worker_id": "x", "study_name": "study", "directions": [1]}\n{"op_co{\n{}\n')
    with pytest.raises(UsageError, match="cannot be used"):
        run(quadratic, trials=1, comm=comm, storage=str(path), **OPTIONS)
    if comm.rank == 0:
        path.unlink()
        with journal(str(path)), pytest.raises(UsageError, match="another job"), journal(str(path)):
            pass
    comm.Barrier()
    run(quadratic, trials=1, comm=comm, storage=str(path), direction="maximize", **OPTIONS)
    with pytest.raises(UsageError, match="the study 'study' in it is one to maximize"):
        run(quadratic, trials=1, comm=comm, storage=str(path), **OPTIONS)


# ---- the trainer ----------------------------------------------------------------------------------------------------


def objective_of(space: str, fixed: str, metric: str = "test_accuracy") -> TrainerObjective:
    return TrainerObjective(fixed.split(), parse_space(space.split()), metric)


def test_a_trial_has_the_bits_of_the_same_run_alone(comm: Intracomm) -> None:
    group = group_size()
    objective = objective_of("lr=log:1e-2..1 model=mlp,logistic hidden=int:8..24", "--steps 20 --batch 50")
    result = run(objective, trials=4, direction="maximize", comm=comm, group=group, **OPTIONS)
    assert result.counts["complete"] == 4
    words = objective.command(result.best_params, result.best_number or 0, group).split("mpicoll.train ")[1].split()
    part = MPI.Intracomm(WORLD.Split(int(comm.rank < group), comm.rank))
    if comm.rank < group:
        config = TrainerObjective(words, (), "test_accuracy").config
        alone = train(config, make_communicator(config, part))
        assert alone["parameters_sha256"] == result.best_attributes["parameters_sha256"]
        assert alone["test_accuracy"] == result.best_value
    part.Free()


def test_trials_share_a_data_set_while_its_options_are_the_same(
    comm: Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[int] = []

    def counted(config: Any, comm: Any) -> Any:
        loads.append(config.seed)
        return load(config, comm)

    monkeypatch.setattr(trainer_objective, "load", counted)
    objective = objective_of("seed=1,2 lr=0.1,0.2", "--steps 3 --dataset synthetic:200x4x3")
    grid = [{"seed": seed, "lr": lr} for seed in (1, 2) for lr in (0.1, 0.2)]
    result = run(objective, grid=grid, direction="maximize", comm=comm, group=WORLD.size, **OPTIONS)
    assert result.counts["complete"] == 4
    assert loads == [1, 2]


def test_a_run_that_diverges_fails_and_others_are_pruned(comm: Intracomm) -> None:
    objective = objective_of("lr=1e30,0.1,1e-5,1e-6,1e-7", "--epochs 9 --batch 300 --warmup 0", "test_loss")
    grid = [{"lr": lr} for lr in (0.1, 1e30, 1e-5, 1e-6, 1e-7)]
    result = run(objective, grid=grid, comm=comm, group=WORLD.size, pruner="asha", **OPTIONS)
    assert result.counts == {"complete": 1, "pruned": 3, "failed": 1, "interrupted": 0}
    assert result.best_params == {"lr": 0.1}
    if result.study is not None:
        assert failed(result)[0].startswith("NonFiniteLoss: the loss became")
        assert all(each.last_step == 1 for each in result.study.trials if each.state.name == "PRUNED")


@pytest.mark.parametrize(
    ("space", "fixed", "says"),
    [
        ("lrate=0..1", "", "--space lrate: not an option"),
        ("json=a,b", "", "--space json: not an option"),
        ("batch=0,32", "", "'0' is not a whole number"),
        ("lr=-1..1", "", "--space lr=-1.0: '-1.0' is not a number of at least 0"),
        ("lr=0..1", "--checkpoint folder", "--checkpoint folder: the same in all trials"),
        ("lr=0..1", "--epochs x", "--epochs"),
        ("optimizer=sgd,adam beta1=0..2", "", "--space beta1=2.0: '2.0' is not a number of at least 0 and below 1"),
    ],
)
def test_options_that_the_trainer_refuses_are_refused_before_the_first_trial(space: str, fixed: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        objective_of(space, fixed)
