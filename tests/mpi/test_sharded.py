"""Ranks that share states, gradients and parameters against ranks that hold everything."""

from __future__ import annotations

import itertools
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll import Intracomm
from mpicoll.train.checkpoints import Store
from mpicoll.train.config import TrainConfig
from mpicoll.train.engine import OneAfterTheOther
from mpicoll.train.models import Model, perceptron
from mpicoll.train.sharded import Sharded
from mpicoll.train.sharding import part
from mpicoll.train.strategy import Replicated, Strategy

pytestmark = pytest.mark.mpi
STAGES = ("optimizer", "gradients", "parameters")
WIDTHS = (7, 11, 5, 9, 3)
BASE = TrainConfig(dtype="float64", momentum=0.9, weight_decay=1e-2, bucket_bytes=1)
"""A unit a layer."""


def make(model: Model, comm: MPI.Intracomm, config: TrainConfig, *, overlap: bool = True) -> Strategy:
    kind = Replicated if config.shard == "none" else Sharded
    return kind(model, model.initial(1), comm, config, overlap=overlap)


class Run:
    """A few steps on random samples, of which each rank takes its part."""

    def __init__(self, model: Model, comm: MPI.Intracomm, config: TrainConfig, *, overlap: bool = True) -> None:
        self.model, self.comm, self.config = model, comm, config
        self.strategy = make(model, comm, config, overlap=overlap)
        self.engine = OneAfterTheOther(model)
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
        self.losses.append(self.comm.allreduce(loss))

    def evaluate(self) -> float:
        x = np.random.default_rng(99).standard_normal((4, self.model.layers[0].shapes[0][0])).astype(self.model.dtype)
        return self.engine.loss(self.strategy, x, np.zeros(4, np.int64))[0]

    def state(self) -> np.ndarray:
        """Return all parameters and velocities, put together from the pieces of all ranks."""
        total = self.model.parameter_count
        found = np.zeros((2, total), self.model.dtype)
        for row, name in enumerate(("parameters", "velocity")):
            entry: Any = self.strategy.tensors()[name]
            if not isinstance(entry, list):
                found[row] = entry.array / self.comm.size
            for piece in entry if isinstance(entry, list) else []:
                assert piece.total == total
                found[row, piece.start : piece.start + piece.array.size] = piece.array
        self.comm.Allreduce(MPI.IN_PLACE, found)
        return found


def same(run: Run, other: Run, rtol: float = 1e-9) -> None:
    np.testing.assert_allclose(run.losses, other.losses, rtol=rtol)
    np.testing.assert_allclose(run.norms, other.norms, rtol=rtol)
    np.testing.assert_allclose(run.state(), other.state(), rtol=rtol, atol=rtol * 0.1)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"accumulate": 3, "clip": 0.3},
        {"bucket_bytes": 700, "nesterov": True},
        {"bucket_bytes": 1 << 20},
        {"dtype": "float32", "clip": 0.5, "nesterov": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("overlap", [False, True])
def test_fifty_steps_are_those_of_replicas(
    subcomm: Intracomm, stage: str, changes: dict[str, Any], overlap: bool
) -> None:
    config = replace(BASE, **changes)
    model = perceptron(WIDTHS, config.dtype)
    plain, sharded = (Run(model, subcomm, replace(config, shard=s), overlap=overlap) for s in ("none", stage))
    for number in range(50):
        plain.step(number)
        sharded.step(number)
        if number % 20 == 0:
            assert sharded.evaluate() == pytest.approx(plain.evaluate(), rel=1e-9 if config.dtype == "float64" else 1e-5)
    assert plain.losses[-1] != plain.losses[0]
    # float32 rounds sums of other orders, and 50 steps add that up
    same(sharded, plain, 1e-9 if config.dtype == "float64" else 2e-5)
    digests = np.empty((subcomm.size, 32), np.uint8)
    subcomm.Allgather(np.frombuffer(sharded.strategy.digest(), np.uint8).copy(), digests)
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


@pytest.mark.parametrize(("before", "after"), itertools.permutations(("none", *STAGES), 2))
def test_checkpoints_fit_every_way_of_sharing(
    comm: Intracomm, before: str, after: str, shared_folder: Any
) -> None:
    model = perceptron(WIDTHS, "float64")
    first = Run(model, comm, replace(BASE, shard=before))
    for number in range(3):
        first.step(number)
    second = Run(model, comm, replace(BASE, shard=after))
    second.step(7)  # what it has gathered must not survive
    second.evaluate()
    with Store(shared_folder, comm) as store:
        store.save(3, first.strategy.tensors(), {})
        store.open().restore(second.strategy.tensors())
    np.testing.assert_array_equal(second.state(), first.state())
    assert second.evaluate() == pytest.approx(first.evaluate(), rel=1e-12)
    first.losses.clear(), second.losses.clear()
    for run in (first, second):
        run.step(3)
    assert second.losses == pytest.approx(first.losses, rel=1e-12)
    np.testing.assert_allclose(second.state(), first.state(), rtol=1e-9, atol=1e-12)


def test_checkpoints_are_divided_anew_for_fewer_ranks(comm: Intracomm, shared_folder: Any) -> None:
    model, config = perceptron(WIDTHS, "float64"), replace(BASE, shard="parameters")
    first = Run(model, comm, config)
    first.step(0)
    with Store(shared_folder, comm) as store:
        store.save(1, first.strategy.tensors(), {})
    expected = first.state()
    part_of = comm.Split(int(comm.rank == comm.size - 1), comm.rank)
    second = Run(model, part_of, replace(config, bucket_bytes=900))
    for turn in range(2):  # one group after the other holds the folder
        if turn == (comm.rank == comm.size - 1):
            with Store(shared_folder, part_of) as store:
                store.open().restore(second.strategy.tensors())
        comm.Barrier()
    np.testing.assert_array_equal(second.state(), expected)
    part_of.Free()


# ---- what it takes --------------------------------------------------------------------------------------------------

BIG = (512, 1024, 1024, 512, 16)
"""2.1 million parameters, 1.05 of them in one layer."""


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


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("stage", ["none", *STAGES])
def test_memory_is_what_the_formula_says(
    comm: Intracomm, stage: str, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared: list[int] = []  # shared memory, which tracemalloc does not see
    zeros = Intracomm.zeros
    monkeypatch.setattr(
        Intracomm, "zeros", lambda *arguments: (array := zeros(*arguments), shared.append(array.nbytes))[0]
    )
    model = perceptron(BIG, "float32")
    initial = model.initial(1)
    warm = Run(model, comm, replace(BASE, dtype="float32", shard=stage, bucket_bytes=4 << 10))
    warm.step(0, rows=comm.size)
    workspaces = warm.model._tape
    del warm
    shared.clear()
    tracemalloc.start()
    try:
        kind = Replicated if stage == "none" else Sharded
        config = replace(BASE, dtype="float32", shard=stage, bucket_bytes=4 << 10)
        run = Run.__new__(Run)
        run.model, run.comm, run.config, run.losses, run.norms = model, comm, config, [], []
        run.strategy, run.engine = kind(model, initial, comm, config, overlap=overlap), OneAfterTheOther(model)
        for number in range(2):
            run.step(number, rows=comm.size)
        measured = tracemalloc.get_traced_memory()[1] + sum(shared)
    finally:
        tracemalloc.stop()
    assert workspaces
    if stage == "none":
        measured += initial.nbytes  # used as they are
    expected = formula(stage, model, comm.size, overlap)
    assert measured == pytest.approx(expected, rel=0.15)
    assert sum(run.strategy.nbytes().values()) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(("stage", "shares"), [("optimizer", 2), ("gradients", 2), ("parameters", 3 - 20 / 61)])
def test_traffic_is_what_the_formula_says(comm: Intracomm, stage: str, shares: float) -> None:
    model = perceptron((20, 20, 20, 20), "float64")  # three equal units, of which two are still there on the way back
    run = Run(model, comm, replace(BASE, shard=stage))
    for number in range(4):
        run.step(number)
    traffic, nbytes = run.strategy.traffic(), 4 * model.parameter_count * 8
    if stage == "parameters":
        shares = 2 + 1 / 3
    assert traffic.sent == pytest.approx(shares * (comm.size - 1) / comm.size * nbytes, rel=0.01)
    assert traffic.dense == pytest.approx(2 * (comm.size - 1) / comm.size * nbytes)
    assert 0 < traffic.waited <= traffic.under_way
