"""Layers that ranks share, and pipelines of them, against one rank that has the whole model."""

from __future__ import annotations

import functools
import itertools
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll import Intracomm
from mpicoll.consensus import wait_politely
from mpicoll.data.datasets import load
from mpicoll.data.sampler import part
from mpicoll.errors import CheckpointFailed, CollectiveTimeout, NonFiniteLoss, ReplicasDiffer, UsageError
from mpicoll.models.builders import perceptron
from mpicoll.models.micro_batches import SequentialMicroBatches
from mpicoll.models.sequential import FlatParameters, Model
from mpicoll.parallel.gradient_norm import norm_of, sum_of_squares
from mpicoll.parallel.mesh import Mesh, make_mesh
from mpicoll.parallel.model_shard import ModelShard
from mpicoll.parallel.pipeline import PipelineStage, most_in_flight
from mpicoll.parallel.strategy import Replicated
from mpicoll.train import training_run
from mpicoll.train.assembly import make_loop
from mpicoll.train.clock import Clock
from mpicoll.train.config import TrainConfig
from mpicoll.train.loop import Loop
from mpicoll.train.model_choice import build_model
from mpicoll.train.training_run import run

pytestmark = pytest.mark.mpi
SHARES = [(2, 1), (3, 1), (4, 1), (1, 2), (1, 3), (1, 4), (2, 2), (4, 2), (2, 4)]
WIDTHS = (6, 7, 5, 9, 4)
CONFIG = TrainConfig(
    dataset="synthetic:300x6x4",
    hidden=WIDTHS[1:-1],
    dtype="float64",
    batch=24,
    steps=50,
    warmup=5,
    lr=0.05,
    microbatches=4,
    progress=False,
    quiet=True,
)


@pytest.fixture(params=SHARES, ids=lambda share: f"tensor{share[0]}-pipeline{share[1]}")
def config(request: pytest.FixtureRequest, comm: Intracomm) -> TrainConfig:
    tensor, pipeline = request.param
    replicas, rest = divmod(comm.size, tensor * pipeline)
    if rest or replicas not in (1, 2) or (replicas == 2 and 4 in (tensor, pipeline)):
        pytest.skip("other meshes are enough")
    return replace(CONFIG, tensor=tensor, pipeline=pipeline)


def batch(rows: int, features: int, classes: int, seed: int = 3) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.standard_normal((rows, features)), random.integers(0, classes, rows)


def cut_in(x: np.ndarray, y: np.ndarray, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(x[slice(*part(len(x), count, i))], y[slice(*part(len(x), count, i))]) for i in range(count)]


class Place:
    """One rank's part of a model of some widths, and the whole of it for comparison."""

    def __init__(self, comm: Intracomm, config: TrainConfig, widths: tuple[int, ...] = WIDTHS) -> None:
        self.mesh, self.whole = make_mesh(comm, config), perceptron(widths, config.dtype)
        self.portion = ModelShard(self.whole, self.mesh, (widths[0],))
        random = np.random.default_rng(1)
        self.parameters = self.whole.initial(0) + 0.1 * random.standard_normal(self.whole.parameter_count)
        self.own = self.portion.cut(self.parameters)
        self.strategy = Replicated(
            self.portion.model, self.own, self.mesh.data, config, overlap=True, squares=self.portion.total_squares
        )
        self.engine: Any = SequentialMicroBatches(self.portion.model)
        if self.mesh.pipeline is not None:
            pipeline, schedule = self.mesh.pipeline, config.pipeline_schedule
            self.engine = PipelineStage(self.portion.model, self.portion.inputs, pipeline, schedule, config.timeout)

    def replicas_parts(self, x: np.ndarray, y: np.ndarray, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
        return cut_in(*cut_in(x, y, self.mesh.replicas)[self.mesh.replica], count)

    def told(self, found: tuple[float, int]) -> list[float]:
        sums = np.array(found if self.mesh.speaks else (0, 0), np.float64)
        self.mesh.world.Allreduce(MPI.IN_PLACE, sums, MPI.SUM)
        return sums.tolist()

    def expected(self, x: np.ndarray, y: np.ndarray) -> tuple[tuple[float, int], np.ndarray]:
        gradient = np.empty_like(self.parameters)
        found = self.whole.loss_and_gradient(FlatParameters(self.whole.layout, self.parameters, gradient), x, y)
        return found, gradient


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_gradients_are_those_of_one_rank(comm: Intracomm, config: TrainConfig, schedule: str) -> None:
    if config.pipeline == 1 and schedule == "gpipe":
        pytest.skip("no pipeline")
    place = Place(comm, replace(config, pipeline_schedule=schedule))
    for seed, (rows, count) in enumerate([(3, 5), (29, 6), (0, 2), (17, 1)]):  # memory that was used is used again
        x, y = batch(rows, WIDTHS[0], WIDTHS[-1], seed)
        wanted, gradient = place.expected(x, y)
        parts = place.replicas_parts(x, y, count)
        found = place.engine.gradients(place.strategy, parts, 1.0, compress=True)
        assert place.mesh.speaks or place.mesh.tensor is not None or found == (0.0, 0)
        np.testing.assert_allclose(place.told(found), wanted, rtol=1e-12)
        place.strategy.reduce()
        np.testing.assert_allclose(place.strategy.sync.flat, place.portion.cut(gradient), rtol=1e-12, atol=1e-12)
        norm = place.strategy.update(0.0, 1.0)
        assert norm == pytest.approx(norm_of(sum_of_squares(gradient)), rel=1e-12)
        tested = place.engine.loss(place.strategy, *place.replicas_parts(x, y, 1)[0])
        np.testing.assert_allclose(place.told(tested), wanted, rtol=1e-12)
    if isinstance(place.engine, PipelineStage):
        stage = place.mesh.pipeline.Get_rank()
        assert place.engine.tapes == most_in_flight(schedule, stage, config.pipeline, 6)


def test_portions_together_are_the_model(comm: Intracomm, config: TrainConfig) -> None:
    mesh, whole = make_mesh(comm, config), perceptron(WIDTHS, np.float64)
    portion = ModelShard(whole, mesh, WIDTHS[:1])
    numbers = np.arange(whole.parameter_count, dtype=np.float64)
    own = portion.cut(numbers)
    held = np.zeros(whole.parameter_count)
    held[own.astype(int)] = 1
    comm.Allreduce(MPI.IN_PLACE, held, MPI.SUM)
    assert held.min() >= mesh.replicas
    pieces = [(a, own[a:b]) for a, b in itertools.pairwise([0, own.size // 3, own.size])]
    found = [portion.total_squares(of) for of in ([(0, own)], pieces, pieces[:1], pieces[1:])]
    assert found == pytest.approx([sum_of_squares(numbers)] * 2 + [found[2], found[0] - found[2]])


def make(comm: MPI.Intracomm, config: TrainConfig) -> tuple[Loop, Mesh]:
    mesh, dataset = make_mesh(comm, config), load(config, comm)
    return make_loop(config, mesh, dataset, build_model(config, dataset), Clock()), mesh


def train(comm: MPI.Intracomm, config: TrainConfig) -> tuple[Loop, Mesh]:
    trainer, mesh = make(comm, config)
    trainer.train([])
    return trainer, mesh


@functools.cache
def train_alone(config: TrainConfig) -> Loop:
    return train(Intracomm(MPI.COMM_SELF), config)[0]


def common_arrays(model: Model, config: TrainConfig, mesh: Mesh, own: np.ndarray) -> np.ndarray:
    portion = ModelShard(model, mesh, WIDTHS[:1])
    views = FlatParameters(portion.model.layout, own)
    arrays = [
        array
        for number, (_, _, common) in enumerate(portion._divided)
        for array, same in zip(views.parameters(number), common, strict=True)
        if same
    ]
    return np.concatenate([np.zeros(1, own.dtype), *map(np.ravel, arrays)])


@pytest.mark.parametrize(
    "more",
    [
        {"dtype": "float32"},
        {"clip": 0.3, "accumulate": 2, "batch": 7, "microbatches": 2},
        {"hidden": (9, 8), "overlap": "on"},
        {"shard": "optimizer", "clip": 0.3, "bucket_bytes": 300, "steps": 20},
        {"shard": "gradients", "clip": 0.3, "accumulate": 2, "batch": 12, "microbatches": 2, "steps": 20},
        {"shard": "parameters", "clip": 0.3, "bucket_bytes": 300, "steps": 20},
    ],
    ids=["float32", "clipped", "overlapping", "optimizer", "gradients", "parameters"],
)
def test_a_run_is_that_of_one_rank(comm: Intracomm, config: TrainConfig, more: dict[str, Any]) -> None:
    config = replace(config, **more)
    if config.pipeline > len(config.hidden) + 1:
        pytest.skip("more stages than layers")
    if config.shard != "none" and comm.size == config.tensor * config.pipeline:
        pytest.skip("one replica only")
    alone = train_alone(replace(config, tensor=1, pipeline=1, microbatches=1, shard="none"))
    trainer, mesh = train(comm, config)
    losses = [[record.loss for record in of.records] for of in (alone, trainer)]
    assert len(losses[0]) == config.steps
    assert losses[0][-1] < losses[0][0]
    exact = config.dtype == "float64"
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-11 if exact else 1e-6)
    np.testing.assert_allclose(trainer.evaluate(), alone.evaluate(), rtol=1e-11 if exact else 1e-6)
    assert len(trainer.check_replicas()) == 64
    if mesh.tensor is not None and config.shard != "parameters":
        own = trainer.strategy.tensors()["parameters"].array
        whole = perceptron((WIDTHS[0], *config.hidden, WIDTHS[-1]), config.dtype)
        mine = common_arrays(whole, config, mesh, own)
        every = np.empty((config.tensor, mine.size), mine.dtype)
        mesh.tensor.Allgather(mine, every)
        assert all(row.tobytes() == mine.tobytes() for row in every)


SUMS = [
    *(("none", spec, 64) for spec in ("qsgd", "topk:0.3", "int8", "sign")),
    *((stage, spec, 64) for stage in ("optimizer", "gradients", "parameters") for spec in ("qsgd", "int8")),
    *((stage, spec, 61) for stage in ("none", "optimizer", "parameters") for spec in ("qsgd", "int8")),
    ("none", "powersgd:2", 61),
    *((stage, None, 7) for stage in ("none", "optimizer", "gradients")),
]


@pytest.mark.parametrize(("shard", "compression", "width"), SUMS, ids=str)
def test_common_arrays_stay_equal_however_gradients_are_summed(
    comm: Intracomm, shard: str, compression: str | None, width: int
) -> None:
    """The second hidden layer's bias and the last layer are long enough to be compressed beside a divided array."""
    if comm.size % 2:
        pytest.skip("two ranks share each layer")
    more: dict[str, Any] = {"shard": shard, "compression": compression, "hidden": (width, 1100), "steps": 8}
    config = replace(CONFIG, tensor=2, dtype="float32", bucket_bytes=1 << 16, lr=0.01, warmup=0, **more)
    around = Intracomm(comm, algorithm="ring") if compression is None else comm
    trainer, mesh = make(around, config)
    trainer.train([])
    layers = range(len(config.hidden) + 1)
    own = np.concatenate([np.ravel(array) for layer in layers for array in trainer.strategy.parameters(layer)])
    mine = common_arrays(perceptron((WIDTHS[0], *config.hidden, WIDTHS[-1]), np.float32), config, mesh, own)
    assert mine.size == 1 + 1100 + 4 * 1100 + 4
    every = np.empty((2, mine.size), np.float32)
    mesh.tensor.Allgather(mine, every)
    np.testing.assert_array_equal(every[0], every[1])
    assert trainer.records[-1].loss < trainer.records[0].loss


def test_a_rank_whose_copies_of_common_arrays_went_astray_is_named(comm: Intracomm) -> None:
    if comm.size % 2 or comm.size < 4:
        pytest.skip("two ranks share each layer, and the most of two is none")
    trainer, mesh = make(comm, replace(CONFIG, tensor=2, hidden=(8, 8)))
    trainer.check_replicas()
    if mesh.tensor.Get_rank() == 1:  # on all replicas alike, but for the ranks whose word counts
        trainer.strategy.parameters(2)[1][0] += 1
    named = ", ".join(str(rank) for rank in range(1, comm.size, 2))
    with pytest.raises(ReplicasDiffer, match=f"of rank {named} differ"):
        trainer.check_replicas()


def test_a_replica_that_went_astray_is_named(comm: Intracomm) -> None:
    config = replace(CONFIG, tensor=2 - comm.size % 2)
    if comm.size // config.tensor < 3:
        pytest.skip("the most of two is none")
    trainer, _ = make(comm, config)
    trainer.check_replicas()
    if comm.rank == config.tensor:
        trainer.strategy.tensors()["parameters"].array[0] += 1
    with pytest.raises(ReplicasDiffer, match=f"of rank {config.tensor} differ"):
        trainer.check_replicas()


def test_a_run_goes_on_bit_for_bit_on_the_same_mesh_only(
    comm: Intracomm, config: TrainConfig, shared_folder: Path
) -> None:
    config = replace(config, steps=10, schedule="constant", clip=1.0)
    uninterrupted = run(config, comm)
    config = replace(config, checkpoint=str(shared_folder / "run"), resume="yes")
    run(replace(config, steps=5), comm)
    for name in ("tensor", "pipeline"):
        if (was := getattr(config, name)) > 1:
            with pytest.raises(CheckpointFailed, match=f"--{name} was {was}, is 1"):
                run(replace(config, **{name: 1}), comm)
    found = run(replace(config, pipeline_schedule="gpipe"), comm)
    assert found["resumed_after"] == 5
    assert found["parameters_sha256"] == uninterrupted["parameters_sha256"]


def test_a_run_goes_on_with_fewer_replicas(comm: Intracomm, config: TrainConfig, shared_folder: Path) -> None:
    places = config.tensor * config.pipeline
    if comm.size == places:
        pytest.skip("one replica only")
    config = replace(config, steps=10, schedule="constant", shard="gradients")
    uninterrupted = run(config, comm)
    config = replace(config, checkpoint=str(shared_folder / "run"), resume="yes")
    run(replace(config, steps=5), comm)
    one = comm.Split(comm.rank // places)
    if comm.rank < places:
        found = run(replace(config, shard="none"), one)
        assert found["resumed_after"] == 5
        assert found["test_loss"] == pytest.approx(uninterrupted["test_loss"], rel=1e-9)
    wait_politely(comm)


def test_what_cannot_be_shared_is_refused_on_every_rank(comm: Intracomm) -> None:
    shared = make_mesh(comm, replace(CONFIG, tensor=comm.size))
    with pytest.raises(UsageError, match=f"--tensor {comm.size}: a layer of width {comm.size - 1} cannot be shared"):
        ModelShard(perceptron((6, 8, 5, comm.size - 1, 4), np.float64), shared, (6,))
    staged = make_mesh(comm, replace(CONFIG, pipeline=comm.size))
    with pytest.raises(UsageError, match=f"--pipeline {comm.size} needs a layer for each stage; .* {comm.size - 1}"):
        ModelShard(perceptron((6, *[5] * (comm.size - 2), 4), np.float64), staged, (6,))
    with pytest.raises(UsageError, match=f"--tensor {comm.size + 1} --pipeline 1: .* ranks, {comm.size}, is not a"):
        make_mesh(comm, replace(CONFIG, tensor=comm.size + 1))


@pytest.mark.parametrize("kind", ["tensor", "pipeline"])
def test_a_run_frees_the_communicators_of_its_mesh_unless_it_fails(
    comm: Intracomm, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A study makes a mesh in each trial, and MPI libraries have a few thousand communicators."""
    if comm.size == 1:
        pytest.skip("one rank has no mesh")
    made: list[Mesh] = []

    def noted(*given: Any) -> Mesh:
        made.append(make_mesh(*given))
        return made[-1]

    monkeypatch.setattr(training_run, "make_mesh", noted)
    config = replace(CONFIG, steps=3, hidden=(8,) * comm.size, **{kind: comm.size})
    for _ in range(2):
        run(config, comm)
    with pytest.raises(NonFiniteLoss):
        run(replace(config, steps=None, epochs=4, lr=1e30, warmup=0), comm)
    first, second, failed = ([mesh.data, getattr(mesh, kind)] for mesh in made)
    assert all(each == MPI.COMM_NULL for each in [*first, *second])
    for each in failed:
        each.Barrier()
        each.Free()
    run(replace(config, **{kind: 1}), comm)
    assert made[-1].data is comm
    comm.Barrier()


def test_a_silent_stage_is_named_in_time(comm: Intracomm) -> None:
    place = Place(comm, replace(CONFIG, pipeline=comm.size, timeout=0.3), (6, *[5] * (comm.size - 1), 4))
    rank, x = comm.rank, batch(5, 6, 4)
    if rank > 0:
        text = f"waited 0.3.* s in vain for the activations of micro-batch 0 from stage {rank - 1}"
        with pytest.raises(CollectiveTimeout, match=text) as caught:
            place.engine.gradients(place.strategy, [x], 1.0, compress=True)
        assert caught.value.missing_ranks == (rank - 1,)
    comm.Barrier()


def test_what_is_on_its_way_is_not_overwritten(comm: Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    widths = (6, *[200] * (comm.size - 1), 4)
    place = Place(comm, replace(CONFIG, pipeline=comm.size), widths)
    if comm.rank == 0:  # the others are ahead, as far as they can
        begin = place.strategy.begin
        monkeypatch.setattr(place.strategy, "begin", lambda *a, **more: (time.sleep(0.05), begin(*a, **more)))
    x, y = batch(600, widths[0], widths[-1])
    _, gradient = place.expected(x, y)
    place.engine.gradients(place.strategy, cut_in(x, y, 4), 1.0, compress=True)
    place.strategy.reduce()
    np.testing.assert_allclose(place.strategy.sync.flat, place.portion.cut(gradient), rtol=1e-9, atol=1e-9)


def test_a_stage_that_takes_nothing_is_named_in_time(comm: Intracomm) -> None:
    place = Place(comm, replace(CONFIG, pipeline=comm.size, timeout=0.3), (6, *[500] * (comm.size - 1), 4))
    assert place.mesh.pipeline is not None
    x, y = batch(1000, 6, 4)
    if comm.rank == 0:
        with pytest.raises(
            CollectiveTimeout, match=r"stage 0 waited .* until stage 1 took the activations of micro-ba"
        ):
            place.engine.loss(place.strategy, x, y)
    comm.Barrier()
    if comm.rank == 1:
        place.mesh.pipeline.Recv(np.empty((1000, 500)), 0)
    comm.Barrier()
