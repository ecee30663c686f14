"""Ranks that share states, gradients and parameters against ranks that hold everything."""

from __future__ import annotations

import itertools
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll import Intracomm
from mpicoll.checkpoint import CheckpointStore, open_checkpoint
from mpicoll.data.sampler import part
from mpicoll.models.builders import perceptron
from mpicoll.models.micro_batches import SequentialMicroBatches
from mpicoll.models.sequential import Model
from mpicoll.parallel.sharded import Sharded
from mpicoll.parallel.strategy import Replicated, Strategy
from mpicoll.train.config import TrainConfig

pytestmark = pytest.mark.mpi
STAGES = ("optimizer", "gradients", "parameters")
WIDTHS = (7, 11, 5, 9, 3)
BASE = TrainConfig(dtype="float64", momentum=0.9, weight_decay=1e-2, bucket_bytes=1)
"""A unit a layer."""


def make(model: Model, comm: MPI.Intracomm, config: TrainConfig, *, overlap: bool = True) -> Strategy:
    if config.shard == "none":  # whose buckets may be longer than a layer: here they would have an element each
        return Replicated(
            model, model.initial(1), comm, replace(config, bucket_bytes=max(400, config.bucket_bytes)), overlap=overlap
        )
    return Sharded(model, model.initial_parameters(1), comm, config, overlap=overlap)


class Run:
    """A few steps on random samples, of which each rank takes its part."""

    def __init__(self, model: Model, comm: MPI.Intracomm, config: TrainConfig, *, overlap: bool = True) -> None:
        self.model, self.comm, self.config = model, comm, config
        self.strategy = make(model, comm, config, overlap=overlap)
        self.engine = SequentialMicroBatches(model)
        self.losses: list[float] = []
        self.norms: list[float] = []

    def step(self, number: int, rows: int = 13) -> None:
        random, layers = np.random.default_rng(number), self.model.layers
        x = random.standard_normal((rows, *layers[0].shapes[0][:1])).astype(self.model.dtype)
        y = random.integers(0, layers[-1].output[0], rows)
        own = slice(*part(rows, self.comm.size, self.comm.rank))
        x, y, count = x[own], y[own], self.config.accumulate
        cuts = [slice(*part(len(x), count, turn)) for turn in range(count)]
        loss, _ = self.engine.gradients(self.strategy, [(x[c], y[c]) for c in cuts], 1 / rows, compress=False)
        self.strategy.reduce()
        self.norms.append(self.strategy.update(0.1 / (1 + number / 20), self.config.clip))
        total = np.array(loss)
        self.comm.Allreduce(MPI.IN_PLACE, total)
        self.losses.append(float(total))

    def evaluate(self) -> float:
        x = np.random.default_rng(99).standard_normal((4, self.model.layers[0].shapes[0][0])).astype(self.model.dtype)
        return self.engine.loss(self.strategy, x, np.zeros(4, np.int64))[0]

    def state(self) -> np.ndarray:
        """Return all parameters and the optimizer's vectors, put together from the pieces of all ranks."""
        total, tensors = self.model.parameter_count, self.strategy.tensors()
        names = [name for name in tensors if name != "optimizer_steps"]
        found = np.zeros((len(names), total), self.model.dtype)
        for row, name in enumerate(names):
            entry: Any = tensors[name]
            if not isinstance(entry, list) and self.comm.rank == 0:
                found[row] = entry.array
            for piece in entry if isinstance(entry, list) else []:
                assert piece.total == total
                found[row, piece.start : piece.start + piece.array.size] = piece.array
        self.comm.Allreduce(MPI.IN_PLACE, found)
        return found


def same(run: Run, other: Run, rtol: float = 1e-9) -> None:
    np.testing.assert_allclose(run.losses, other.losses, rtol=rtol)
    np.testing.assert_allclose(run.norms, other.norms, rtol=rtol)
    np.testing.assert_allclose(run.state(), other.state(), rtol=rtol, atol=rtol)


CASES: list[tuple[bool, int, dict[str, Any]]] = [
    (True, 50, {}),
    (False, 8, {"bucket_bytes": 700, "nesterov": True}),
    (True, 8, {"accumulate": 3, "clip": 0.3}),
    (True, 8, {"bucket_bytes": 1 << 20}),
    (False, 50, {"dtype": "float32", "clip": 0.5, "bucket_bytes": 400}),
    (True, 8, {"optimizer": "sgd"}),
    (False, 8, {"optimizer": "adagrad", "clip": 0.3}),
    (True, 8, {"optimizer": "adam", "beta2": 0.9, "epsilon": 1e-4, "bucket_bytes": 700}),
    (False, 8, {"optimizer": "adamw", "epsilon": 1e-4, "accumulate": 3}),
]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("overlap", "steps", "changes"), CASES, ids=str)
def test_steps_are_those_of_replicas(
    comm: Intracomm, stage: str, overlap: bool, steps: int, changes: dict[str, Any]
) -> None:
    config = replace(BASE, **changes)
    model = perceptron(WIDTHS, config.dtype)
    plain, sharded = (Run(model, comm, replace(config, shard=s), overlap=overlap) for s in ("none", stage))
    rtol = 1e-9 if config.dtype == "float64" else 1e-6
    for number in range(steps):
        plain.step(number)
        sharded.step(number)
        if number % 7 == 0:
            assert sharded.evaluate() == pytest.approx(plain.evaluate(), rel=rtol)
    same(sharded, plain, rtol)
    digests = np.empty((comm.size, 32), np.uint8)
    comm.Allgather(np.frombuffer(sharded.strategy.digest(), np.uint8).copy(), digests)
    assert (digests == digests[0]).all()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("widths", [(1, 1), (1, 2, 1, 2)])
def test_units_with_fewer_elements_than_ranks(comm: Intracomm, stage: str, widths: tuple[int, ...]) -> None:
    model = perceptron(widths, "float64")
    plain, sharded = (Run(model, comm, replace(BASE, shard=s, clip=0.1)) for s in ("none", stage))
    for number in range(5):
        plain.step(number, rows=2)
        sharded.step(number, rows=2)
    same(sharded, plain)


@pytest.mark.parametrize("stage", STAGES)
def test_other_communicators_do(comm: Intracomm, stage: str) -> None:
    native, model = MPI.Intracomm(comm), perceptron(WIDTHS, "float64")
    plain, sharded = Run(model, comm, BASE), Run(model, native, replace(BASE, shard=stage))
    for number in range(3):
        plain.step(number)
        sharded.step(number)
    same(sharded, plain)


@pytest.mark.parametrize(("before", "after"), list(itertools.permutations(("none", *STAGES), 2)))
def test_checkpoints_fit_every_way_of_sharing(comm: Intracomm, before: str, after: str, folder: Path) -> None:
    model = perceptron(WIDTHS, "float64")
    first = Run(model, comm, replace(BASE, shard=before))
    for number in range(3):
        first.step(number)
    second = Run(model, comm, replace(BASE, shard=after))
    second.step(7)  # what it has gathered must not survive
    second.evaluate()
    with CheckpointStore(folder, comm) as store:
        store.save(3, first.strategy.tensors(), {})
        store.open().restore(second.strategy.tensors())
    np.testing.assert_array_equal(second.state(), first.state())
    assert second.evaluate() == pytest.approx(first.evaluate(), rel=1e-12)
    first.losses.clear(), second.losses.clear()
    for run in (first, second):
        run.step(3)
    assert second.losses == pytest.approx(first.losses, rel=1e-12)
    np.testing.assert_allclose(second.state(), first.state(), rtol=1e-9, atol=1e-12)


def test_checkpoints_are_divided_anew_for_fewer_ranks(comm: Intracomm, folder: Path) -> None:
    model, config = perceptron(WIDTHS, "float64"), replace(BASE, shard="parameters")
    first = Run(model, comm, config)
    first.step(0)
    with CheckpointStore(folder, comm) as store:
        store.save(1, first.strategy.tensors(), {})
    expected = first.state()
    part_of = comm.Split(int(comm.rank == comm.size - 1), comm.rank)
    second = Run(model, part_of, replace(config, bucket_bytes=900))
    open_checkpoint(folder, part_of).restore(second.strategy.tensors())
    np.testing.assert_array_equal(second.state(), expected)
    part_of.Free()


# ---- what it takes --------------------------------------------------------------------------------------------------

BIG = (256, 768, 768, 768, 768, 16)
"""2 million parameters, 0.6 in each of the three largest layers."""


def formula(stage: str, model: Model, size: int, overlap: bool) -> int:
    """The table of :class:`Sharded`, in bytes."""
    psi, bounds = model.parameter_count, model.layout.bounds
    u = max(b - a for a, b in itertools.pairwise(bounds))
    own = psi / size
    elements = {
        "none": 3 * psi,
        "optimizer": 2 * psi + own,
        "gradients": psi + u + 2 * own,
        "parameters": 3 * own + (3 if overlap else 2) * u,
    }
    return int(elements[stage] * model.dtype.itemsize)


@pytest.mark.parametrize(
    ("stage", "overlap"),
    [("none", False), ("optimizer", False), ("gradients", False), ("parameters", False), ("parameters", True)],
)
def test_memory_is_what_the_formula_says(comm: Intracomm, stage: str, overlap: bool) -> None:
    """NumPy tells tracemalloc of all its arrays, those in shared memory too."""
    model, config = perceptron(BIG, "float32"), replace(BASE, dtype="float32", shard=stage, bucket_bytes=4 << 10)
    Run(model, comm, config, overlap=overlap).step(0, rows=comm.size)  # the model keeps its workspaces
    tracemalloc.start()
    try:
        run = Run(model, comm, config, overlap=overlap)
        tracemalloc.reset_peak()  # the initial parameters are gone
        for number in range(2):
            run.step(number, rows=comm.size)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    expected = formula(stage, model, comm.size, overlap)
    assert peak == pytest.approx(expected, rel=0.15)
    assert sum(run.strategy.nbytes().values()) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("stage", "shares"), [("optimizer", 2), ("gradients", 2), ("parameters", 2 + 1 / 3)])
def test_traffic_is_what_the_formula_says(comm: Intracomm, stage: str, shares: float, overlap: bool) -> None:
    model = perceptron((20, 20, 20, 20), "float64")  # of three equal units two are still there on the way back
    if stage == "parameters" and not overlap:
        shares += 1 / 3
    run = Run(model, comm, replace(BASE, shard=stage), overlap=overlap)
    for number in range(4):
        run.step(number)
    traffic, nbytes = run.strategy.traffic(), 4 * model.parameter_count * 8
    assert traffic.sent == pytest.approx(shares * (comm.size - 1) / comm.size * nbytes, rel=0.01)
    assert traffic.dense == pytest.approx(2 * (comm.size - 1) / comm.size * nbytes)
    assert 0 < traffic.waited <= traffic.under_way
