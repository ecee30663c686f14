"""Population-based training on groups of ranks: states arrive, failures stay alone, what was saved goes on."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll import Intracomm
from mpicoll.deploy.deployed_model import DeployedModel
from mpicoll.deploy.evaluation import accuracy as evaluated_accuracy
from mpicoll.deploy.inference import Runtime
from mpicoll.deploy.model_sources import load_data, load_model
from mpicoll.errors import CheckpointFailed, SearchError, TrainingError, UsageError
from mpicoll.search import PopulationResult, population_run, run_population
from mpicoll.search.member_transfer import transfer
from mpicoll.search.population_settings import as_json
from mpicoll.search.search_options import parse_search
from mpicoll.search.trainer_member import TrainerPopulation, check_best, save_best
from mpicoll.search.trial_execution import Interrupted
from mpicoll.train.assembly import make_communicator
from mpicoll.train.training_run import run as train

pytestmark = pytest.mark.mpi
WORLD = MPI.COMM_WORLD
SPACE = ["rate=log:1e-3..2", "batch=1,2,4"]


def group_size() -> int:
    """Return the size of groups of which there are several if possible."""
    return next((size for size in (2, 3) if WORLD.size % size == 0 and WORLD.size > size), 1)


class Descent:
    """Member that descends a parabola; its rank-dependent part must stay with the rank's place in the group."""

    def __init__(self, number: int, fails: dict[tuple[int, int], Any] | None = None) -> None:
        self.number, self.fails = number, fails or {}
        self.x, self.steps = np.full(5, 3.0 + number, np.float32), np.zeros(1, np.int64)
        self.place = np.full((2, 1), WORLD.rank % group_size())

    def train(self, params: Any, comm: Intracomm) -> float:
        self.steps += 1
        failure = self.fails.get((self.number, int(self.steps[0]) - 1))
        if failure == "one rank" and comm.rank == comm.size - 1:
            raise ZeroDivisionError("by nothing")
        if failure == "stop":
            raise Interrupted
        gradient = (2 * self.x * params["batch"] / 4 / comm.size).astype(np.float32)
        comm.Allreduce(MPI.IN_PLACE, gradient)
        if failure == "nan":
            return math.nan
        if failure == "all":
            raise TrainingError("none of the ranks can")
        self.x -= np.float32(params["rate"]) * gradient
        assert self.place[0, 0] == WORLD.rank % group_size()
        return -float(np.sum(self.x.astype(np.float64) ** 2))

    def state(self) -> dict[str, np.ndarray]:
        return {"x": self.x, "steps": self.steps, "place": self.place, "empty": np.empty(0)}

    def load(self, state: dict[str, np.ndarray]) -> None:
        if state:
            assert state["empty"].size == 0
            self.x, self.steps, self.place = state["x"], state["steps"], state["place"]


def evolve(comm: Intracomm, fails: Any = None, **more: Any) -> PopulationResult:
    members = max(4, 2 * (comm.size // group_size()) + 1)
    options: dict[str, Any] = {"members": members, "generations": 6, "group": group_size(), "seed": 5, "timeout": 20.0}
    return run_population(lambda number: Descent(number, fails), SPACE, comm=comm, **{**options, **more})


def told_alike(comm: Intracomm, result: PopulationResult) -> list[dict[str, Any]]:
    found = [as_json(each) for each in result.history]
    assert comm.allgather(found) == [found] * comm.size
    return found


def test_a_population_is_the_same_each_time_and_gets_better(comm: Intracomm) -> None:
    told: list[Any] = []
    first, second = evolve(comm, told=told.extend), evolve(comm)
    history = told_alike(comm, first)
    assert history == told_alike(comm, second)
    assert [as_json(each) for each in told] == (history if comm.rank == 0 else [])
    assert first.new_generations == 6
    copied = [each for each in first.history if each.state == "copied"]
    assert copied
    assert all(each.generation < 5 for each in copied)
    last = [each.score for each in first.history if each.generation == 5]
    assert first.best_score == max(last)
    assert len(first.schedule()) == 6
    # A copy continues from the source's state, bit for bit, as the score of the next generation shows.
    for number, member in first.members.items():
        assert -float(np.sum(member.x.astype(np.float64) ** 2)) == last[number]
        digest = np.frombuffer(member.x.tobytes(), np.uint8)
        assert member.place[0, 0] == comm.rank % group_size()
        assert digest.size == 20


def test_a_copy_has_the_bits_of_its_source(comm: Intracomm) -> None:
    """With a rate of nothing members keep what they have: after copies all hold the first value of some member."""
    result = run_population(
        Descent, ["rate=1e-30..2e-30", "batch=1,2"], members=4 * (comm.size // group_size()), generations=8, comm=comm,
        group=group_size(), timeout=20.0,
    )  # fmt: skip
    best = {float(member.x[0]) for member in result.members.values()}
    everywhere = set().union(*comm.allgather(best))
    assert everywhere < {3.0 + number for number in range(4 * (comm.size // group_size()))}
    assert 3.0 in everywhere
    assert max(everywhere) < 2.0 + 4 * (comm.size // group_size())


@pytest.mark.parametrize("kind", ["one rank", "nan", "all"])
def test_a_member_that_fails_continues_from_another(comm: Intracomm, kind: str) -> None:
    result = evolve(comm, {(1, 1): kind, (0, 3): kind})
    told_alike(comm, result)
    failed = [each for each in result.history if each.state == "failed"]
    assert failed
    assert failed[0][:2] == (1, 1)
    assert math.isnan(failed[0].score)
    assert failed[0].source != 1
    expected = {"one rank": "ZeroDivisionError: by nothing", "nan": "returned nan", "all": "none of the ranks can"}
    assert expected[kind] in failed[0].reason
    assert result.best_number is not None


def test_a_population_without_scores_ends_on_all_ranks(comm: Intracomm) -> None:
    fails = {(number, 0): "nan" for number in range(64)}
    with pytest.raises(TrainingError, match="all members have failed in generation 0"):
        evolve(comm, fails)
    assert comm.allgather(comm.rank) == list(range(comm.size))


def test_a_population_goes_on_from_its_storage(comm: Intracomm, shared_folder: Path) -> None:
    whole = told_alike(comm, evolve(comm))
    path = str(shared_folder / "population")
    assert evolve(comm, generations=2, storage=path).new_generations == 2
    stopped = evolve(comm, {(1, 4): "stop"}, storage=path)
    assert (stopped.new_generations, stopped.stopped) == (2, True)
    rest = evolve(comm, storage=path)
    assert rest.new_generations == 2
    again = told_alike(comm, rest)
    # After the last generation of a shorter run nothing is copied.
    size = len(whole) // 6
    assert again[: 2 * size - size] == whole[:size]
    assert evolve(comm, storage=path).new_generations == 0
    with pytest.raises(UsageError, match="seed was 5, is 6"):
        evolve(comm, storage=path, seed=6)


def test_an_interrupted_population_is_that_of_an_uninterrupted_one(comm: Intracomm, shared_folder: Path) -> None:
    whole = told_alike(comm, evolve(comm))
    path = str(shared_folder / "population")
    stopped = evolve(comm, {(1, 3): "stop"}, storage=path)
    assert (stopped.new_generations, stopped.stopped) == (3, True)
    assert told_alike(comm, evolve(comm, storage=path)) == whole


def test_storage_of_something_else(comm: Intracomm, shared_folder: Path) -> None:
    if comm.rank == 0:
        (shared_folder / "file").write_text("text")
    comm.Barrier()
    with pytest.raises(Exception, match="file"):
        evolve(comm, storage=str(shared_folder / "file"))


@pytest.mark.parametrize(
    ("options", "says"),
    [({"members": 0}, "--population 0"), ({"timeout": 0.0}, "--timeout 0"), ({"group": 99}, "--group 99")],
)
def test_arguments_that_are_refused_on_all_ranks(comm: Intracomm, options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        evolve(comm, **options)


def test_states_cross_between_ranks(comm: Intracomm) -> None:
    channel = MPI.Intracomm(comm).Dup()
    pairs = [(rank, (rank + 1) % comm.size) for rank in range(comm.size)] + [(0, 0)]

    def own(number: int) -> dict[str, np.ndarray]:
        return {
            "a": np.arange(70000.0) + comm.rank,
            "b": np.array([[comm.rank, number]], np.int8),
            "c": np.empty((0, 2)),
        }

    found = transfer(channel, pairs, own, 20.0)
    expected = {number: source for number, (source, target) in enumerate(pairs) if target == comm.rank}
    assert set(found) == set(expected)
    for number, source in expected.items():
        state = found[number]
        assert np.array_equal(state["a"], np.arange(70000.0) + source)
        assert state["b"].tolist() == [[source, number]]
        assert state["c"].shape == (0, 2)
    if comm.size > 1 and comm.rank == 0:
        with pytest.raises(SearchError, match=r"waited 0\.05 s for the state of a member of rank 1"):
            transfer(channel, [(1, 0)], own, 0.05)
    comm.Barrier()
    channel.Free()


# ---- members of the command line ------------------------------------------------------------------------------------

FIXED = ("--dataset=synthetic:800x6x4", "--hidden=12", "--epochs=4", "--warmup=5", "--timeout=20")


def population(comm: Intracomm, space: str, *words: str, **more: Any) -> tuple[TrainerPopulation, PopulationResult]:
    count = max(2, comm.size // group_size())
    options = parse_search(
        ["--population", str(count), "--space", *space.split(), *words, "--", *FIXED, *more.pop("fixed", ())]
    )
    source = TrainerPopulation(options)
    return source, run_population(
        source.member, space.split(), members=count, generations=source.generations, comm=comm, group=group_size(),
        timeout=20.0, **more,
    )  # fmt: skip


@pytest.mark.parametrize("fixed", ["", "--optimizer adam --lr 0.01", "--strategy sharded", "--strategy local",
                                   "--compression topk:0.2", "--batch-norm synchronized", "--batch-norm local",
                                   "--precision bfloat16", "--precision float16 --strategy sharded",
                                   "--batch-norm local --precision bfloat16 --strategy sharded"])  # fmt: skip
def test_a_member_that_is_not_replaced_has_the_bits_of_a_run_alone(
    comm: Intracomm, fixed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Members stop and go on after each epoch."""
    monkeypatch.setattr(population_run, "replacements", lambda *_, **__: [])
    source, result = population(comm, "weight-decay=1e-4..1e-3", fixed=fixed.split())
    part = Intracomm(MPI.Intracomm(MPI.Intracomm(comm).Split(comm.rank // group_size(), comm.rank)))
    for number, member in result.members.items():
        params = next(each.params for each in result.history if each.member == number)
        config = source.configured(params)
        alone = train(config, make_communicator(config, part))
        assert member.record is not None
        assert member.record.test_loss == alone["test_loss"]
        assert member.record.test_accuracy == alone["test_accuracy"]


@pytest.mark.parametrize("fixed", ["", "--batch-norm local --precision bfloat16", "--strategy sharded"])
def test_the_best_member_is_a_checkpoint_that_can_be_deployed(comm: Intracomm, shared_folder: Path, fixed: str) -> None:
    _, result = population(comm, "lr=0.02..0.1", fixed=fixed.split())
    folder = str(shared_folder / "best")
    save_best(folder, result, comm)
    model = load_model(folder, {}, comm)
    accuracy = comm.allreduce(accuracy_of(model, comm) or 0.0) / comm.size
    assert accuracy == pytest.approx(result.best_score, abs=1.1 / 160)  # logits of the same parameters, one sample less
    if comm.rank == 0:
        with pytest.raises(UsageError, match="has checkpoints already"):
            check_best(folder)
        with pytest.raises(UsageError, match="--best /proc/none"):
            check_best("/proc/none")
    comm.Barrier()
    with pytest.raises(CheckpointFailed, match=r"--best .*: has a checkpoint of step"):
        save_best(folder, result, comm)


def accuracy_of(model: DeployedModel, comm: Intracomm) -> float | None:
    return evaluated_accuracy(Runtime(model), load_data(model, {}, comm), comm)


def test_members_that_diverge_are_replaced(comm: Intracomm) -> None:
    _, result = population(comm, "lr=0.05,1e30", seed=next_seed(comm))
    assert [each.state for each in result.history if each.params["lr"] > 1]
    assert {each.state for each in result.history if each.params["lr"] > 1 and each.generation == 0} == {"failed"}
    assert result.best_number is not None
    assert result.best_score > 0.5


def next_seed(comm: Intracomm) -> int:
    """Return a seed whose first members have both rates."""
    from mpicoll.search.population_selection import first_params
    from mpicoll.search.search_space import parse_space

    count, space = max(2, comm.size // group_size()), parse_space(["lr=0.05,1e30"])
    return next(seed for seed in range(100) if len({each["lr"] for each in first_params(space, count, seed)}) == 2)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--space model=mlp,conv", "--space model: cannot change while a member trains"),
        ("--space lr=0.1,0.2 --json r.json -- --strategy gossip", "synchronous strategies"),
        ("--space lr=0.1,0.2 -- --json r.json", "--json: is not for --population"),
        ("--space lr=0.1,0.2 -- --steps 4", "--steps: is not for --population"),
        ("--space momentum=0..2", "momentum"),
    ],
)
def test_options_that_members_refuse(comm: Intracomm, words: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        TrainerPopulation(parse_search(["--population", "4", *words.split()]))
