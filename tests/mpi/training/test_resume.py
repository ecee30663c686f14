"""A run goes on from its checkpoint, whatever may differ between the two."""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll import Intracomm
from mpicoll.checkpoint import CheckpointStore, open_checkpoint
from mpicoll.checkpoint.durable_files import steps_in
from mpicoll.consensus import wait_politely
from mpicoll.errors import NonFiniteLoss
from mpicoll.models.micro_batches import SequentialMicroBatches
from mpicoll.parallel import strategy as strategies
from mpicoll.search.search_options import parse_search
from mpicoll.search.trainer_member import TrainerPopulation
from mpicoll.train.asynchronous.work_sharing import WorkSharing
from mpicoll.train.config import TrainConfig
from mpicoll.train.coordination import Share
from mpicoll.train.options import parse
from mpicoll.train.saver import FREE
from mpicoll.train.step_plan import StepPlan
from mpicoll.train.training_run import run
from tests import extent
from tests.mpi.conftest import common_folder

pytestmark = pytest.mark.mpi
CONFIG = TrainConfig(
    dataset="synthetic:600x6x4",
    hidden=(40, 40),
    batch=48,
    epochs=2,
    steps=6,
    checkpoint_every=3,
    warmup=2,
    lr=0.05,
    schedule="constant",
    timeout=20.0,
    progress=False,
)
SIGN = {"compression": "sign"}
SERVED: dict[str, Any] = {"mode": "ps", "servers": 1}
SYNCHRONOUS: dict[str, Any] = {**SERVED, "staleness": 0}
Options = dict[str, Any]
OUTPUTS: Options = {
    "json": "FOLDER/a.json",
    "log_steps": "FOLDER/a.csv",
    "plot": "FOLDER/a.png",
    "tensorboard": "FOLDER/events",
    "run": "b",
    "trace": "FOLDER/trace.json",
    "trace_steps": 2,
    "progress": True,
    "quiet": False,
}
DELAYS: Options = {"slow": ((0, 1.5),), "jitter": 1e-4, "step_seconds": 1e-4}
SAVING: Options = {"checkpoint_every": 1, "evaluate_every": 2, "timeout": 30.0, "resume": "fallback"}
PAIRS: list[tuple[Options, Options]] = [
    ({}, {**OUTPUTS, **DELAYS}),
    (SERVED, {**OUTPUTS, **DELAYS, "plot": None}),
    ({}, {"balance": "auto"}),
    *((first, {"prefetch": 2}) for first in ({}, {"mode": "local", "accumulate": 2})),
    ({"dataset": "digits"}, {"share_data": True}),
    *((first, {"background_checkpoints": True}) for first in ({}, SERVED, {"mode": "local"})),
    ({"background_checkpoints": True, "shard": "parameters"}, {"checkpoint_every": 1}),
    ({"balance": "auto"}, {"balance": "equal"}),
    *((first, {**SAVING, "epochs": 3}) for first in ({}, SERVED, {"mode": "gossip"})),
    *((first, {"steps": 2}) for first in ({}, SERVED, {"mode": "p2p"})),
    *((first, {"steps": None, "epochs": 1, "checkpoint_every": None}) for first in ({}, SERVED)),
    *((first, {"checkpoint": "FOLDER/other"}) for first in ({}, SERVED)),
    *((first, {"algorithm": "ring", "overlap": "on"}) for first in ({}, SIGN)),
    (SERVED, {"algorithm": "ring"}),
    ({"compression": "randomk:0.1"}, {"algorithm": "ring", "bucket_bytes": 1000}),
    *(({"compression": spec}, {"bucket_bytes": 5000}) for spec in ("sign", "topk:0.1", "powersgd:2", "int8", None)),
    ({"compression": "sign", "bucket_bytes": 5000}, {"bucket_bytes": 1 << 20}),
    ({"mode": "local", "compression": "sign"}, {"bucket_bytes": 5000}),
    ({**SERVED, "compression": "topk:0.1"}, {"bucket_bytes": 5000}),
    *(({"shard": "none"}, {"shard": name}) for name in ("optimizer", "gradients")),
    *(({"shard": name}, {"shard": "none"}) for name in ("optimizer", "gradients")),
    ({"shard": "gradients"}, {"shard": "parameters", "bucket_bytes": 1000, "overlap": "off"}),
    ({"optimizer": "adam", "lr": 0.01}, {"shard": "parameters"}),
    ({"shard": "gradients", "compression": "qsgd:4", "accumulate": 2}, {"offload": "FOLDER"}),
    ({"precision": "float16", "optimizer": "adam", "lr": 0.01, "shard": "parameters"}, {"shard": "none"}),
    ({"precision": "bfloat16"}, {"shard": "gradients", "overlap": "on", "bucket_bytes": 1000}),
    ({"batch_norm": "local"}, {"shard": "optimizer", "algorithm": "ring"}),
    ({"optimizer": "adam", "lr": 0.01, "shard": "parameters"}, {"offload": "FOLDER"}),
    ({"precision": "bfloat16", "shard": "gradients", "hidden": [40, 40]}, {"offload": "FOLDER"}),
    ({"optimizer": "adamw", "lr": 0.01, "shard": "gradients"}, {"shard": "none"}),
    ({"optimizer": "adagrad", "lr": 0.01, "shard": "optimizer"}, {"shard": "gradients"}),
    ({"optimizer": "adam", "lr": 0.01, "compression": "sign"}, {"overlap": "on"}),
    ({"mode": "local", "optimizer": "adam", "lr": 0.01}, {"steps": 2}),
    ({"optimizer": "lamb", "lr": 0.01}, {"overlap": "on"}),
    ({"optimizer": "lamb", "lr": 0.01}, {"shard": "gradients", "bucket_bytes": 1000}),
    ({"optimizer": "lars", "lr": 1.0, "pipeline": 2}, {"overlap": "on"}),
    ({"pipeline": 2, "microbatches": 2}, {"pipeline_schedule": "gpipe"}),
    ({"hidden": [16, 12, 8]}, {"recompute": 2}),
    *(({**SERVED, "staleness": staleness}, {"servers": 2}) for staleness in (None, 0)),
    ({**SERVED, "servers": 2}, {"servers": 1}),
    *((SYNCHRONOUS, {"staleness": staleness}) for staleness in (4, None)),
    *(({**SERVED, "staleness": staleness}, {"staleness": 0}) for staleness in (4, None)),
    ({**SYNCHRONOUS, "optimizer": "adam"}, {"staleness": 4}),
    ({**SERVED, "optimizer": "adam"}, {"staleness": 0}),
    ({**SYNCHRONOUS, "compression": "topk:0.1"}, {"staleness": 4}),
    ({**SERVED, "push": "direct"}, {"staleness": 4}),
    (SYNCHRONOUS, {"backup": 1}),
    ({**SYNCHRONOUS, "backup": 1}, {"backup": 0}),
    ({**SYNCHRONOUS, "backup": 1}, {"backup": 0, "staleness": None}),
    ({**SYNCHRONOUS, "backup": 1}, {"servers": 2}),
    (SERVED, {"pull_compression": "int8"}),
    ({**SYNCHRONOUS, "pull_compression": "topk:0.1"}, {"pull_compression": None}),
    (SERVED, {"damping": True, "on_silence": "drop", "on_failure": "end", "spares": 0, "replicas": 1}),
]
"""What a run begins with, and what differs when it goes on."""


def name_of(pair: tuple[Options, Options]) -> str:
    return " then ".join(",".join(f"{name}={value}" for name, value in each.items()) for each in pair)


def test_all_options_that_may_differ_are_tried() -> None:
    assert {name for _, second in PAIRS for name in second} == set(FREE)
    assert set(FREE) <= {field.name for field in fields(TrainConfig)}


def configured(folder: Path, options: Options, size: int) -> TrainConfig:
    placed = {
        name: value.replace("FOLDER", str(folder)) if isinstance(value, str) else value
        for name, value in options.items()
    }
    config = replace(CONFIG, **{"checkpoint": str(folder / "run"), **placed})
    if config.servers + config.backup >= size or (config.pipeline > 1 and size % config.pipeline):
        pytest.skip("too few ranks")
    return config


@pytest.fixture(scope="module")
def begun(verdicts: MPI.Intracomm) -> Iterator[Path]:
    """A folder for first runs, which are the same in many tests."""
    with common_folder(verdicts) as path:
        yield path


def begin(comm: Intracomm, begun: Path, folder: Path, first: Options) -> TrainConfig:
    """Let `folder` have the checkpoints of a first run."""
    kept = begun / hashlib.sha256(name_of((first, {})).encode()).hexdigest()
    config = configured(kept, first, comm.size)
    there = kept.is_dir()
    wait_politely(comm)
    if not there:
        if comm.rank == 0:
            kept.mkdir()
        wait_politely(comm)
        run(config, comm)
    if comm.rank == 0:
        shutil.copytree(kept / "run", folder / "run")
    wait_politely(comm)
    return config


@pytest.mark.parametrize("pair", PAIRS, ids=name_of)
def test_a_resume_with_other_values_works(
    comm: Intracomm, begun: Path, shared_folder: Path, pair: tuple[Options, Options]
) -> None:
    first, second = pair
    wanted = configured(shared_folder, {"resume": "yes", "quiet": True, **first, "steps": 10, **second}, comm.size)
    begin(comm, begun, shared_folder, first)
    result = run(wanted, comm)
    assert result["resumed_after"] == (0 if "checkpoint" in second else 6)
    assert np.isfinite(result["test_loss"])


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        (SIGN, {"bucket_bytes": 5000}, "not restored: residuals: they are of other buckets, see --bucket-bytes\n"),
        (SIGN, {}, None),
        ({**SERVED, "compression": "topk:0.1"}, {}, "not restored: residuals, which each worker keeps for itself\n"),
    ],
)
def test_what_begins_anew_is_said_once(
    comm: Intracomm,
    begun: Path,
    shared_folder: Path,
    capfd: pytest.CaptureFixture[str],
    first: Options,
    second: Options,
    says: str | None,
) -> None:
    wanted = configured(shared_folder, {**first, "steps": 8, "resume": "yes", **second}, comm.size)
    begin(comm, begun, shared_folder, {**first, "quiet": True})
    capfd.readouterr()
    run(wanted, comm)
    text = capfd.readouterr().out
    assert text.count("not restored") == (comm.rank == 0 and says is not None)
    assert says is None or comm.rank or says in text


def test_residuals_of_an_older_checkpoint_are_taken_over(
    comm: Intracomm, shared_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They had another name there."""
    whole = configured(shared_folder, {**SIGN, "steps": 8, "checkpoint": str(shared_folder / "whole")}, comm.size)
    config = configured(shared_folder, SIGN, comm.size)
    with monkeypatch.context() as patch:
        patch.setattr(strategies, "RESIDUAL", "owed.")
        run(config, comm)
    names = open_checkpoint(shared_folder / "run", MPI.COMM_SELF, patience=0).per_rank_names
    assert any("owed." in name for name in names)
    resumed = run(replace(config, steps=8, resume="yes"), comm)
    assert resumed["resumed_after"] == 6
    assert resumed["parameters_sha256"] == run(whole, comm)["parameters_sha256"]


LENGTHS = {
    "longer": ({"schedule": "cosine"}, {"steps": 8}, "learning rates follow a schedule of 8 steps, before it was 6\n"),
    "more epochs": ({"schedule": "step"}, {"steps": None, "epochs": 3}, "a schedule of 30 steps, before it was 6\n"),
    "served": ({**SERVED, "schedule": "cosine"}, {"steps": 8}, "a schedule of 8 steps, before it was 6\n"),
    "as long": ({"schedule": "cosine"}, {"epochs": 3}, None),
    "constant": ({}, {"steps": 8}, None),
    "quiet": ({"schedule": "cosine"}, {"steps": 8, "quiet": True}, None),
}


@pytest.mark.parametrize("name", LENGTHS)
def test_a_schedule_of_another_length_is_said_once(
    comm: Intracomm, begun: Path, shared_folder: Path, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    first, second, says = LENGTHS[name]
    wanted = configured(shared_folder, {**first, "resume": "yes", **second}, comm.size)
    begin(comm, begun, shared_folder, {**first, "quiet": True})
    capfd.readouterr()
    assert run(wanted, comm)["resumed_after"] == 6
    text = capfd.readouterr().out
    assert text.count("learning rates follow") == (comm.rank == 0 and says is not None)
    assert says is None or comm.rank or says in text


def test_an_old_checkpoint_that_does_not_tell_its_schedule_is_taken(
    comm: Intracomm, shared_folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, save = configured(shared_folder, {"schedule": "cosine"}, comm.size), CheckpointStore.save

    def saved_as_before(self: CheckpointStore, step: int, tensors: Any, facts: dict[str, Any]) -> None:
        save(self, step, tensors, {name: fact for name, fact in facts.items() if name != "schedule_steps"})

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointStore, "save", saved_as_before)
        run(config, comm)
    assert "schedule_steps" not in open_checkpoint(shared_folder / "run", MPI.COMM_SELF, patience=0).facts
    assert run(replace(config, steps=8, resume="yes"), comm)["resumed_after"] == 6
    assert "learning rates follow" not in capfd.readouterr().out


@pytest.mark.parametrize("options", [{}, SERVED], ids=["together", "served"])
def test_background_checkpoints_leave_no_communicator(
    comm: Intracomm, shared_folder: Path, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[MPI.Intracomm] = []
    duplicate = Intracomm.Dup

    def noted(self: Intracomm, *given: Any) -> Any:
        made.append(duplicate(self, *given))
        return made[-1]

    more = {**options, "background_checkpoints": True, "quiet": True}
    monkeypatch.setattr(Intracomm, "Dup", noted)
    run(configured(shared_folder, more, comm.size), comm)
    assert bool(made) == (not options or comm.rank == 0)
    assert all(each == MPI.COMM_NULL for each in made)


def test_a_momentum_that_an_older_version_ignored_is_ignored_again(comm: Intracomm, shared_folder: Path) -> None:
    config = configured(shared_folder, {"optimizer": "sgd", "momentum": 0.5, "quiet": True}, comm.size)
    run(config, comm)
    again = replace(config, momentum=TrainConfig.momentum, steps=8, resume="yes")
    assert run(again, comm)["resumed_after"] == 6


def velocity_in(folder: Path) -> np.ndarray:
    """Return the velocity in the newest checkpoint; the mean of those that ranks have of their own."""
    found = open_checkpoint(folder, MPI.COMM_SELF, patience=0)
    if "velocity" in found.vectors:
        return found.read("velocity")
    (name,) = (name for name in found.per_rank_names if name.endswith("velocity"))
    return np.mean(found.per_rank(name), axis=0)


WITH_VELOCITY: list[Options] = [SYNCHRONOUS, SERVED, {"mode": "p2p"}, {"mode": "gossip"}, {"mode": "local"}, SIGN]


@pytest.mark.parametrize("options", WITH_VELOCITY, ids=lambda options: name_of((options, {})))
def test_the_velocity_is_taken_over_by_another_number_of_ranks(
    comm: Intracomm, shared_folder: Path, options: Options
) -> None:
    """At a momentum of 0.99 a velocity is many gradients; one step from zero would be one."""
    if comm.size < 3:
        pytest.skip("too few ranks")
    more = {**options, "momentum": 0.99, "lr": 1e-3, "quiet": True, "steps": 10}
    config = configured(shared_folder, more, comm.size)
    run(config, comm)
    before = velocity_in(shared_folder / "run")
    fewer = comm.Split(int(comm.rank == comm.size - 1), comm.rank)
    if comm.rank < comm.size - 1:
        run(replace(config, resume="yes", steps=11), fewer)
    wait_politely(comm)
    after = velocity_in(shared_folder / "run")
    assert open_checkpoint(shared_folder / "run", MPI.COMM_SELF).facts["ranks"] == comm.size - 1
    assert np.linalg.norm(after) > 0.5 * np.linalg.norm(before) > 0
    assert after @ before > 0.8 * np.linalg.norm(after) * np.linalg.norm(before)


@pytest.mark.parametrize("averaging", ["periodic", "elastic", "final"])
def test_local_steps_go_on_from_all_replicas_on_another_number_of_ranks(
    comm: Intracomm, shared_folder: Path, averaging: str
) -> None:
    """The checkpoint lies between two averages, where the centre knows nothing of the last steps."""
    if comm.size < 2:
        pytest.skip("too few ranks")
    more: Options = {"mode": "local", "averaging": averaging, "steps": 30, "epochs": 9, "checkpoint_every": 14}
    more |= {"sync_every": 100} if averaging != "final" else {}
    config = configured(shared_folder, {**more, "quiet": True, "dataset": "synthetic:6000x6x4", "steps": 15}, comm.size)
    before = run(config, comm)
    if comm.rank == 0:
        shutil.rmtree(shared_folder / "run" / "step-00000015")  # that of the end, for which replicas were averaged
    fewer = comm.Split(int(comm.rank == comm.size - 1), comm.rank)
    if comm.rank < comm.size - 1:
        after = run(replace(config, resume="yes", steps=15), fewer)
        assert after["test_loss"] < before["test_loss"] + 0.2
        assert after["resumed_after"] == 14
    wait_politely(comm)


RANDOM: list[Options] = [
    *({"shard": shard, "compression": "qsgd:4"} for shard in ("none", "optimizer", "gradients", "parameters")),
    *({"compression": spec} for spec in ("randomk:0.3", "wangni:0.3", "common:rounding=stochastic", "powersgd:1")),
    *({"compression": "qsgd:4", "accumulate": 2, "overlap": overlap} for overlap in ("on", "off")),
]


@pytest.mark.parametrize("more", RANDOM, ids=lambda each: name_of((each, {})))
def test_random_compressors_go_on_with_the_bits_of_a_whole_run(
    comm: Intracomm, shared_folder: Path, more: Options
) -> None:
    """The choices belong to the step: checkpoints, and another run before this one, do not change them."""
    more = {**more, "quiet": True, "bucket_bytes": 3000}
    for _ in range(2):
        whole = run(configured(shared_folder, {**more, "steps": 8, "checkpoint": None}, comm.size), comm)
    config = configured(shared_folder, {**more, "checkpoint_every": 2}, comm.size)
    run(config, comm)
    again = run(replace(config, resume="yes", steps=8), comm)
    assert again["parameters_sha256"] == whole["parameters_sha256"]


@pytest.mark.parametrize("strategy", ["replicated", "sharded", "sharded_optimizer --optimizer adam --lr 0.01"])
def test_random_compressors_of_a_population_draw_as_in_a_whole_run(comm: Intracomm, strategy: str) -> None:
    words = f"--dataset synthetic:600x6x4 --epochs 3 --batch 48 --compression qsgd:4 --strategy {strategy}".split()
    search = parse_search(["--population", "2", "--space", "clip=none,0.5", "--", *words])
    member, whole = TrainerPopulation(search).member(0), run(parse([*words, "--quiet"]), comm)
    for epoch in whole["epochs"]:
        member.train({"clip": None}, comm)
        assert member.record is not None
        assert member.record.test_loss == epoch["test_loss"]


ASYNCHRONOUS: list[Options] = [SERVED, SYNCHRONOUS, {"mode": "p2p"}, {"mode": "gossip"}]


@pytest.mark.parametrize("options", ASYNCHRONOUS, ids=lambda each: name_of((each, {})))
def test_nothing_is_saved_once_a_rank_has_seen_nan(
    comm: Intracomm, shared_folder: Path, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 alone sees it; the chief ends its work as after a signal, which would save."""
    more = {**options, "quiet": True, "checkpoint_every": 1000, "epochs": 20, "steps": None}
    config = configured(shared_folder, more, comm.size)
    if comm.size - config.servers < 2:
        pytest.skip("too few workers")
    gradients, calls = SequentialMicroBatches.gradients, [0]

    def broken(self: SequentialMicroBatches, *given: Any, **more: Any) -> tuple[float, int]:
        loss, correct = gradients(self, *given, **more)
        calls[0] += 1
        return (np.nan if comm.rank == 1 and calls[0] == 4 else loss), correct

    monkeypatch.setattr(SequentialMicroBatches, "gradients", broken)
    with pytest.raises(NonFiniteLoss, match="the loss became nan in step"):
        run(config, comm)
    wait_politely(comm)
    assert not list((shared_folder / "run").glob("step-*"))


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("options", ASYNCHRONOUS, ids=lambda each: name_of((each, {})))
def test_the_last_checkpoint_is_the_model_of_the_result(
    comm: Intracomm, shared_folder: Path, options: Options, background: bool
) -> None:
    """Replicas that differ are averaged before it is written; resuming changes nothing more."""
    more = {**options, "quiet": True, "checkpoint_every": 1000, "background_checkpoints": background}
    config = configured(shared_folder, more, comm.size)
    result = run(config, comm)
    wait_politely(comm)
    saved = open_checkpoint(shared_folder / "run", MPI.COMM_SELF).read("parameters")
    assert hashlib.sha256(saved.tobytes()).hexdigest() == result["parameters_sha256"]
    again = run(replace(config, resume="yes"), comm)
    assert again["parameters_sha256"] == result["parameters_sha256"]
    assert [each["test_loss"] for each in again["epochs"]] == [each["test_loss"] for each in result["epochs"]]


def wait_until(done: Callable[[], bool]) -> None:
    """Return when `done` returns True, or after half of the run's timeout."""
    give_up = time.perf_counter() + CONFIG.timeout / 2
    while not done() and time.perf_counter() < give_up:
        MPI.COMM_WORLD.Iprobe()  # lets the library serve what others do in this rank's windows
        time.sleep(0.001)


@pytest.mark.parametrize("options", ASYNCHRONOUS, ids=lambda each: name_of((each, {})))
def test_a_chief_that_is_slow_to_begin_saves_no_checkpoint_without_a_step(
    comm: Intracomm, shared_folder: Path, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others have taken a step, but nothing of it may have arrived."""
    config = configured(shared_folder, {**options, "quiet": True, "checkpoint_every": 1}, comm.size)
    shares, saved, save = WorkSharing.shares, [], CheckpointStore.save

    def late(self: WorkSharing) -> Iterator[Share]:
        if self.attends and comm.size - config.servers > 1 and config.staleness != 0:
            wait_until(lambda: self._counter.draw(0) >= self.shares_per_step)
        return shares(self)

    def noting(self: CheckpointStore, step: int, *more: Any) -> None:
        saved.append(step)
        save(self, step, *more)

    monkeypatch.setattr(WorkSharing, "shares", late)
    monkeypatch.setattr(CheckpointStore, "save", noting)
    run(config, comm)
    assert 0 not in saved
    assert bool(saved) == (comm.rank == 0)


@pytest.mark.parametrize(
    "options", [*ASYNCHRONOUS, {}, {"mode": "local"}, {"shard": "parameters"}], ids=lambda each: name_of((each, {}))
)
def test_a_step_to_nan_is_not_saved(
    comm: Intracomm, shared_folder: Path, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss is known before the step is taken: only the parameters tell that the last one went too far."""
    more = {"quiet": True, "checkpoint_every": 1, "epochs": 9, "steps": 60}
    config = configured(shared_folder, {**options, **more}, comm.size)

    def saved() -> bool:
        return bool(steps_in(shared_folder / "run"))

    def rate(self: StepPlan, step: int) -> float:
        if step >= 4 and comm.rank:  # without waiting, the others may take all steps before the chief takes its second
            wait_until(saved)
        return 1e300 if step >= 5 and saved() else 0.05  # a server that is slow to begin may not have applied a step

    monkeypatch.setattr(StepPlan, "rate", rate)
    with pytest.raises(NonFiniteLoss):
        run(config, comm)
    wait_politely(comm)
    found = open_checkpoint(shared_folder / "run", MPI.COMM_SELF)
    assert found.step > 0
    assert all(np.isfinite(found.read(name)).all() for name in found.vectors)
    assert all(np.isfinite(array).all() for name in found.per_rank_names for array in found.per_rank(name))


@pytest.mark.parametrize("shard", extent.first(1, ["parameters", "none"]))
def test_a_slow_rank_gets_a_smaller_part(comm: Intracomm, shared_folder: Path, shard: str) -> None:
    """Losses are those of equal parts, and the run that goes on begins with the parts of the one before."""
    if comm.size < 2:
        pytest.skip("too few ranks")
    slow: Options = {"steps": 40, "epochs": 9, "checkpoint_every": 40, "slow": ((1, 4.0),), "step_seconds": 0.01}
    config = configured(shared_folder, {**slow, "balance": "auto", "shard": shard, "quiet": True}, comm.size)
    result = run(config, comm)
    equal = run(replace(config, balance="equal", slow=(), step_seconds=0.0, checkpoint=None), comm)
    losses = [[epoch["train_loss"] for epoch in found["epochs"]] for found in (result, equal)]
    np.testing.assert_allclose(*losses, rtol=1e-4)
    assert equal["shares"] is None
    assert result["shares"][1] < 0.6 / comm.size
    assert len(set(comm.allgather(tuple(result["shares"])))) == 1
    again = run(replace(config, resume="yes", steps=43), comm)
    np.testing.assert_allclose(again["shares"], result["shares"], rtol=1e-12)
