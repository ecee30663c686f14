"""ShardedOptimizer against an optimizer that holds everything, and its refusals."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicoll
from mpicoll import Intracomm, ShardedOptimizer
from mpicoll.checkpoint import CheckpointStore
from mpicoll.errors import MismatchError, MpicollError, RemoteError, UsageError
from mpicoll.models.layers import BatchNorm, Dense, RandomKey, Workspace
from mpicoll.models.sequential import Model
from mpicoll.optim.optimizers import OPTIMIZERS
from mpicoll.optim.update_rule import ParameterSpan
from tests.mpi.conftest import common_folder

pytestmark = pytest.mark.mpi
STAGES = (1, 2, 3)
SHAPES = [[(7, 5), (5,)], [(5, 3), (3,), (2, 1)], [(3, 11)], [(1,)]]
Units = list[list[np.ndarray]]


def initial(dtype: str = "float64", seed: int = 3) -> Units:
    random = np.random.default_rng(seed)
    return [[random.standard_normal(shape).astype(dtype) for shape in unit] for unit in SHAPES]


def gradients(step: int, rank: int, dtype: str = "float64") -> Units:
    random = np.random.default_rng((step, rank))
    return [[random.standard_normal(shape).astype(dtype) for shape in unit] for unit in SHAPES]


class Plain:
    """An optimizer that holds all parameters, and takes the gradients of all ranks."""

    def __init__(
        self, units: Units, optimizer: str, decay: float, clip: float | None, settings: dict[str, Any]
    ) -> None:
        self.flat = np.concatenate([array.reshape(-1) for unit in units for array in unit])
        ends = np.cumsum([0, *(array.size for unit in units for array in unit)]).tolist()
        decays = [array.ndim > 1 for unit in units for array in unit]
        spans = [ParameterSpan(*span) for span in zip(ends, ends[1:], decays, strict=False)]
        self.rule = OPTIMIZERS[optimizer](self.flat, settings, weight_decay=decay, spans=spans)
        self.clip = clip

    def step(self, step: int, size: int, rate: float, samples: list[float], parts: int = 1) -> float:
        total = np.zeros_like(self.flat)
        for rank in range(size):
            for number in range(parts):
                units = gradients(step * 10 + number, rank, str(self.flat.dtype))
                total += np.concatenate([array.reshape(-1) for unit in units for array in unit])
        total /= sum(samples)
        norm = float(np.sqrt(total @ total))
        scale = self.clip / norm if self.clip is not None and norm > self.clip else 1.0
        self.rule.apply(total, rate, scale=scale)
        return norm


def take(sharded: ShardedOptimizer, step: int, rate: float, samples: float, parts: int = 1) -> float:
    dtype = str(sharded._dtype)
    for number in range(parts):
        for unit in range(len(SHAPES)):
            assert [array.shape for array in sharded.gather(unit)] == SHAPES[unit]
            sharded.release(unit)
        units = gradients(step * 10 + number, sharded.comm.rank, dtype)
        for unit in reversed(range(len(SHAPES))):
            with sharded.gathered(unit):
                sharded.complete(unit, units[unit], last=number == parts - 1)
    return sharded.step(rate, samples=samples)


def whole(sharded: ShardedOptimizer) -> np.ndarray:
    found = []
    for unit in range(len(SHAPES)):
        with sharded.gathered(unit) as arrays:
            found += [array.reshape(-1).copy() for array in arrays]
    return np.concatenate(found)


def test_a_unit_is_released_after_an_exception(comm: Intracomm) -> None:
    sharded = ShardedOptimizer(initial(), comm=comm, stage=3)
    with pytest.raises(KeyError), sharded.gathered(0):
        raise KeyError("in the block")
    assert [array.shape for array in sharded.gather(1)] == SHAPES[1]


CASES: list[tuple[str, bool, int, dict[str, Any]]] = [
    ("sgd", True, 1, {}),
    ("momentum", False, 2, {"clip": 0.4, "weight_decay": 0.1, "momentum": 0.8}),
    ("momentum", True, 1, {"momentum": 0.5, "nesterov": True}),
    ("adagrad", False, 1, {"epsilon": 1e-4}),
    ("adam", True, 3, {"beta1": 0.8, "epsilon": 1e-4}),
    ("adamw", True, 1, {"weight_decay": 0.1, "clip": 1.0}),
]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("optimizer", "overlap", "parts", "options"), CASES, ids=str)
def test_steps_are_those_of_an_optimizer_that_holds_everything(
    comm: Intracomm, stage: int, optimizer: str, overlap: bool, parts: int, options: dict[str, Any]
) -> None:
    settings = {name: value for name, value in options.items() if name not in ("clip", "weight_decay")}
    plain = Plain(initial(), optimizer, options.get("weight_decay", 0.0), options.get("clip"), settings)
    sharded = ShardedOptimizer(initial(), comm=comm, stage=stage, optimizer=optimizer, overlap=overlap, **options)
    samples = [float(3 + rank) for rank in range(comm.size)]
    for step in range(6):
        rate = 0.1 / (1 + step)
        norm = plain.step(step, comm.size, rate, samples, parts)
        found = take(sharded, step, rate, samples[comm.rank], parts)
        if "clip" in options:
            assert found == pytest.approx(norm, rel=1e-12)
    np.testing.assert_allclose(whole(sharded), plain.flat, rtol=1e-12, atol=1e-13)
    assert sharded.steps == 6


@pytest.mark.parametrize("stage", STAGES)
def test_float32_and_mean_over_ranks(comm: Intracomm, stage: int) -> None:
    plain = Plain(initial("float32"), "momentum", 0.0, None, {})
    sharded = ShardedOptimizer(initial("float32"), comm=comm, stage=stage, optimizer="momentum", lr=0.05)
    for step in range(4):
        plain.step(step, comm.size, 0.05, [1.0] * comm.size)
        take(sharded, step, 0.05, 1.0)
    assert whole(sharded).dtype == np.float32
    np.testing.assert_allclose(whole(sharded), plain.flat, rtol=2e-5, atol=2e-6)


def test_memory_of_each_stage(comm: Intracomm) -> None:
    count, units = 1000, 8
    arrays = [[np.zeros((count, 2), np.float32)] for _ in range(units)]
    held = {}
    for stage in STAGES:
        sharded = ShardedOptimizer(arrays, comm=comm, stage=stage, optimizer="adam", overlap=False)
        held[stage] = sharded.nbytes()
    psi, unit = 4 * 2 * count * units, 4 * 2 * count
    share, rounding = psi / comm.size, 4 * units * comm.size
    near: Callable[[float], Any] = lambda nbytes: pytest.approx(nbytes, abs=rounding)  # noqa: E731
    assert held[1] == {"parameters": psi, "gradients": psi, "optimizer": near(2 * share)}
    assert held[2] == {"parameters": psi, "gradients": near(share + unit), "optimizer": near(2 * share)}
    expected = {"parameters": near(share + unit), "gradients": near(share + unit), "optimizer": near(2 * share)}
    assert held[3] == expected


@pytest.mark.parametrize("lazily", [True, False])
def test_units_are_functions_or_layers(comm: Intracomm, lazily: bool) -> None:
    layers = [Dense(4, 6, relu=True), Dense(6, 3, relu=False)]
    model = Model(layers, np.float64)
    flat = model.initial(7)
    parts = [model.layout.views(layer, flat[model.layout.bounds[layer] :]) for layer in range(2)]
    calls = []

    def unit(number: int) -> list[np.ndarray]:
        calls.append(number)
        return [array.copy() for array in parts[number]]

    units: list[Any] = [lambda: unit(0), lambda: unit(1)] if lazily else list(layers)
    options = {} if lazily else {"dtype": "float64", "seed": 7}
    sharded = ShardedOptimizer(units, comm=comm, stage=3, **options)
    for number in range(2):
        with sharded.gathered(number) as arrays:
            for array, expected in zip(arrays, parts[number], strict=True):
                np.testing.assert_array_equal(array, expected)
    assert sorted(calls) == ([0, 0, 1, 1] if lazily else [])


def test_gathered_arrays_are_read_only(comm: Intracomm) -> None:
    sharded = ShardedOptimizer(initial(), comm=comm, stage=3)
    with sharded.gathered(1) as arrays, pytest.raises(ValueError, match="read-only"):
        arrays[0][...] = 1
    first = whole(sharded)
    np.testing.assert_array_equal(first, np.concatenate([a.reshape(-1) for unit in initial() for a in unit]))


# ---- state ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2), (2, 1)])
def test_state_goes_to_other_ranks_and_stages(comm: Intracomm, before: int, after: int) -> None:
    options: dict[str, Any] = {"optimizer": "adam", "lr": 0.05, "epsilon": 1e-4}
    with common_folder(comm) as folder:
        first = ShardedOptimizer(initial(), comm=comm, stage=before, **options)
        for step in range(3):
            take(first, step, 0.05, 1.0)
        root = comm.size - 1
        state = first.state_dict(root)
        assert bool(state) == (comm.rank == root)
        if comm.rank == root:
            assert {name.split(".")[0] for name in state} == {"parameters", "mean", "square", "steps"}
            assert state["mean.1.2"].shape == (2, 1)
            np.savez(folder / "state.npz", **state)
        comm.Barrier()
        alone = Intracomm(MPI.COMM_SELF)
        small = ShardedOptimizer(initial(seed=9), comm=alone, stage=after, **options)
        with np.load(folder / "state.npz") as found:
            small.load_state_dict(found)
        again = small.state_dict()
        other = ShardedOptimizer(initial(seed=9), comm=comm, stage=after, **options)
        other.load_state_dict(again if comm.rank == 0 else {})
        assert other.steps == small.steps == 3
        for step in range(3, 5):
            take(first, step, 0.05, 1.0)
            take(other, step, 0.05, 1.0)
        np.testing.assert_array_equal(whole(other), whole(first))


def test_parts_go_to_a_checkpoint_store(comm: Intracomm) -> None:
    with common_folder(comm) as folder:
        first = ShardedOptimizer(initial(), comm=comm, stage=3, optimizer="adam")
        take(first, 0, 0.1, 1.0)
        with CheckpointStore(folder / "run", comm) as store:
            store.save(1, first.tensors(), {})
            second = ShardedOptimizer(initial(seed=4), comm=comm, stage=2, optimizer="adam")
            whole(second)
            store.open().restore(second.tensors())
        np.testing.assert_array_equal(whole(second), whole(first))
        for each in (first, second):
            take(each, 1, 0.1, 1.0)
        np.testing.assert_allclose(whole(second), whole(first), rtol=1e-13)
        assert second.steps == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("mean.0.1"), "'mean.0.1' is missing"),
        (lambda state: state.update(velocity=np.zeros(3)), "'velocity' is not part"),
        (lambda state: state.update({"parameters.2.0": np.zeros((11, 3))}), r"parameters.2.0 is float64 of shape"),
        (lambda state: state.update({"parameters.3.0": np.zeros(1, np.float32)}), r"float32 of shape"),
        (lambda state: state.update({"parameters.3.0": [1.0]}), r"list, not an array"),
        (lambda state: state.update(steps=np.array([-1])), r"steps is -1"),
    ],
)
def test_wrong_state_is_refused_on_every_rank(comm: Intracomm, change: Any, message: str) -> None:
    sharded = ShardedOptimizer(initial(), comm=comm, stage=3, optimizer="adam")
    state = sharded.state_dict()
    if comm.rank == 0:
        change(state)
    kind: Any = (TypeError, ValueError) if comm.rank == 0 else RemoteError
    with pytest.raises(kind, match=message):
        sharded.load_state_dict(state)


def normalized(comm: Intracomm, stage: int, *, synchronized: bool = False) -> tuple[ShardedOptimizer, BatchNorm]:
    """Return an optimizer of two layers, and the one of them that has running statistics."""
    norm = BatchNorm((8,), synchronized=synchronized)
    return ShardedOptimizer([Dense(4, 8), norm], comm=comm, stage=stage, optimizer="adam", dtype="float64"), norm


def normalize(sharded: ShardedOptimizer, norm: BatchNorm, step: int, rank: int) -> None:
    """Take a step in which the batch normalisation sees samples of this rank's own."""
    x = np.random.default_rng((step, rank)).standard_normal((3 + rank, 8))
    room = Workspace()
    room.key = RandomKey(0, step, np.arange(len(x)))
    for number in range(2):
        with sharded.gathered(number) as arrays:
            if number == 1:
                norm.forward(arrays, x, room)
        sharded.complete(number, [np.full(shape, 0.1 * (step + 1)) for shape in sharded.shapes[number]])
    sharded.step()


@pytest.mark.parametrize("synchronized", [True, False])
@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2)])
def test_running_statistics_go_to_other_ranks_and_stages(
    comm: Intracomm, before: int, after: int, synchronized: bool
) -> None:
    first, norm = normalized(comm, before, synchronized=synchronized)
    for step in range(3):
        normalize(first, norm, step, comm.rank)
    kept, root = first.state_dict(comm.size - 1), comm.size - 1
    if comm.rank == root:
        assert kept["running_statistics.0"].shape == (16,)
        np.testing.assert_array_equal(kept["running_statistics.0"], norm.running)
        assert not np.shares_memory(kept["running_statistics.0"], norm.running)
        assert (kept["running_statistics.0"][:8] != 0).all()
    other, restored = normalized(comm, after, synchronized=synchronized)
    normalize(other, restored, 7, comm.rank)  # what it has seen must leave no trace
    other.load_state_dict(kept, root)
    for step in range(3, 5):
        normalize(first, norm, step, comm.rank)
        normalize(other, restored, step, comm.rank)
    there, here = first.state_dict(), other.state_dict()
    assert there.keys() == here.keys()
    for name, array in there.items():
        np.testing.assert_array_equal(here[name], array, err_msg=name)
    np.testing.assert_array_equal(restored.running, norm.running)


@pytest.mark.parametrize("wrong", [None, np.zeros(8), np.zeros(16, np.float32)])
def test_wrong_running_statistics_are_refused_on_every_rank(comm: Intracomm, wrong: np.ndarray | None) -> None:
    sharded, norm = normalized(comm, 2)
    normalize(sharded, norm, 0, comm.rank)
    state = sharded.state_dict()
    if comm.rank == 0:
        del state["running_statistics.0"]
        state |= {} if wrong is None else {"running_statistics.0": wrong}
    kind: Any = ValueError if comm.rank == 0 else RemoteError
    with pytest.raises(kind, match=r"running_statistics\.0"):
        sharded.load_state_dict(state)


# ---- offload --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_offloaded_state_changes_no_bit(comm: Intracomm, stage: int) -> None:
    options: dict[str, Any] = {"comm": comm, "stage": stage, "optimizer": "adam", "lr": 0.05}
    with tempfile.TemporaryDirectory() as folder:
        in_memory, in_file = (
            ShardedOptimizer(initial(), **options),
            ShardedOptimizer(initial(), offload=folder, **options),
        )
        assert not list(Path(folder).iterdir())
        for step in range(3):
            for sharded in (in_memory, in_file):
                take(sharded, step, 0.05, 1.0)
        np.testing.assert_array_equal(whole(in_file), whole(in_memory))
        state = in_file.state_dict()
        for name, array in in_memory.state_dict().items():
            np.testing.assert_array_equal(state[name], array)
        assert in_file.nbytes()["optimizer"] == 0
        assert in_file.nbytes()["offloaded"] == in_memory.nbytes()["optimizer"]


def test_offloaded_state_does_not_stay_in_memory(comm: Intracomm) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    count, units = 1 << 20, 6
    with tempfile.TemporaryDirectory(dir=Path.home()) as folder:
        arrays = [lambda: [np.zeros(count, np.float32)] for _ in range(units)]
        alone = Intracomm(MPI.COMM_SELF)
        sharded = ShardedOptimizer(arrays, comm=alone, stage=3, optimizer="adam", offload=folder)
        for unit in range(units):
            sharded.complete(unit, [np.ones(count, np.float32)])
        before = resident()
        sharded.step()
        assert resident() - before < 8 * count * 2  # a unit's state, of the six
        assert sharded.nbytes()["offloaded"] == 8 * count * units


def test_folder_that_cannot_be_used_is_refused_on_every_rank(comm: Intracomm) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = folder if comm.rank else f"{folder}/missing"
        with pytest.raises(UsageError, match=r"^offload .*/missing: rank 0: No such file"):
            ShardedOptimizer(initial(), comm=comm, offload=path)


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("units", "options", "message"),
    [
        (np.zeros(3), {}, "units: a list of units"),
        ([], {}, "units: there are none"),
        ([np.zeros(3)], {}, "unit 0 is one array"),
        ([[np.zeros(3)], []], {}, "unit 1 has no elements"),
        ([[np.zeros(3), [1.0]]], {}, "unit 0 has list among"),
        ([[np.zeros(3)], [np.zeros(3, np.float32)]], {}, "one dtype is needed, these have float32, float64"),
        ([[np.zeros(3, int)]], {}, "float32 or float64 in native byte order, not int64"),
        (None, {"stage": 4}, "stage: 4 is not"),
        (None, {"stage": True}, "stage: True is not"),
        (None, {"optimizer": "lamb"}, "optimizer: 'lamb'"),
        (None, {"momentum": 0.5}, "momentum: 'adamw' has no such setting"),
        (None, {"lr": -1.0}, "lr: -1.0"),
        (None, {"clip": 0}, "clip: 0"),
        (None, {"weight_decay": float("nan")}, "weight_decay: nan"),
        (None, {"dtype": "float32"}, "dtype: only for units that are layers"),
        ([lambda: 1 / 0], {}, "division by zero"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused_on_every_rank(comm: Intracomm, units: Any, options: Any, message: str) -> None:
    given = initial() if units is None else units
    with pytest.raises((TypeError, ValueError, ZeroDivisionError), match=message):
        ShardedOptimizer(given, comm=comm, **options)
    wrong = comm.rank == comm.size - 1  # on one rank alone
    kind: Any = (TypeError, ValueError, ZeroDivisionError) if wrong else RemoteError
    with pytest.raises(kind, match=message if wrong else f"rank {comm.size - 1} refused its arguments"):
        ShardedOptimizer(given if wrong else initial(), comm=comm, **(options if wrong else {}))
    take(ShardedOptimizer(initial(), comm=comm), 0, 0.1, 1.0)  # the communicator is usable


@pytest.mark.parametrize("options", [{"stage": 2}, {"optimizer": "sgd"}, {"clip": 1.0}, {"seed": 4}], ids=str)
def test_arguments_that_differ_are_refused_on_every_rank(comm: Intracomm, options: dict[str, Any]) -> None:
    if comm.size == 1:
        pytest.skip("needs two ranks")
    units = initial(seed=4 if comm.rank == 0 and "seed" in options else 3)
    changed = options if comm.rank == 0 and "seed" not in options else {}
    with pytest.raises(MismatchError, match=r"sharded optimizer: rank .* differs"):
        ShardedOptimizer(units, comm=comm, **changed)


def unit_order(sharded: ShardedOptimizer) -> None:
    sharded.gather(0)
    sharded.gather(1)


def release_unused(sharded: ShardedOptimizer) -> None:
    sharded.release(1)


def complete_another(sharded: ShardedOptimizer) -> None:
    sharded.gather(0)
    sharded.complete(1, None)


def complete_twice(sharded: ShardedOptimizer) -> None:
    sharded.complete(1, None)
    sharded.complete(1, None)


def step_early(sharded: ShardedOptimizer) -> None:
    sharded.complete(1, None)
    sharded.step()


def save_within_a_step(sharded: ShardedOptimizer) -> None:
    sharded.complete(1, None)
    sharded.state_dict()


MISUSES: list[tuple[Callable[[ShardedOptimizer], Any], type[Exception], str]] = [
    (lambda sharded: sharded.gather(4), IndexError, r"unit: 4 is not in 0..3"),
    (lambda sharded: sharded.gather("a"), TypeError, "str"),  # type: ignore[arg-type]
    (unit_order, RuntimeError, r"gather\(1\): unit 0 is in use"),
    (release_unused, RuntimeError, r"release\(1\): the unit is not in use"),
    (complete_another, RuntimeError, r"complete\(1\): unit 0 is in use"),
    (complete_twice, RuntimeError, r"complete\(1\): the unit is complete"),
    (lambda sharded: sharded.complete(0, [np.zeros((7, 5))]), ValueError, r"unit 0 has shapes \[\(7, 5\), \(5,\)\]"),
    (lambda sharded: sharded.complete(3, [np.zeros(1, int)]), TypeError, "unit 3 is of float64, not of int64"),
    (lambda sharded: sharded.complete(3, np.zeros(1)), TypeError, "needs a list of arrays"),
    (step_early, RuntimeError, "units without complete gradients: 0, 2, 3"),
    (lambda sharded: sharded.step(-1), ValueError, "lr: -1"),
    (lambda sharded: sharded.step(samples="a"), TypeError, "samples: 'a'"),  # type: ignore[arg-type]
    (save_within_a_step, RuntimeError, "state_dict: not between"),
    (lambda sharded: sharded.state_dict(9), ValueError, "root: 9"),
]


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(("misuse", "kind", "message"), MISUSES, ids=lambda value: getattr(value, "__name__", None))
def test_misuse_is_refused_on_every_rank(
    comm: Intracomm, stage: int, misuse: Callable[[ShardedOptimizer], Any], kind: type[Exception], message: str
) -> None:
    sharded = ShardedOptimizer(initial(), comm=comm, stage=stage)
    with pytest.raises(kind, match=message):
        misuse(sharded)
    after = ShardedOptimizer(initial(), comm=comm, stage=stage)  # all have refused: the communicator is usable
    take(after, 0, 0.1, 1.0)


def test_gradients_that_are_wrong_on_one_rank_raise_on_all(comm: Intracomm) -> None:
    if comm.size == 1:
        pytest.skip("needs two ranks")
    sharded = ShardedOptimizer(initial(), comm=comm, stage=3)
    wrong = comm.rank == 1
    with pytest.raises(ValueError if wrong else MpicollError, match="unit 2 has shapes"):
        sharded.complete(2, [np.zeros((3, 12 if wrong else 11))])


@pytest.mark.parametrize("stage", STAGES)
def test_ranks_that_do_something_else_are_found_before_the_update(comm: Intracomm, stage: int) -> None:
    if comm.size == 1:
        pytest.skip("needs two ranks")
    sharded = ShardedOptimizer([[np.zeros(6)], [np.zeros(6)]], comm=comm, stage=stage, optimizer="sgd")
    for unit in (0, 1) if comm.rank == 0 else (1, 0):  # of equal lengths: no collective notices
        sharded.complete(unit, [np.ones(6)])
    with pytest.raises(MismatchError, match=r"units gathered or completed in this step, .* differ from"):
        sharded.step(0.1)
    for unit in (0, 1):
        sharded.complete(unit, [np.ones(6)])
    with pytest.raises(MismatchError, match=r"or lr on ranks? .* from those of the other"):
        sharded.step(0.1 + comm.rank)
    for unit in (0, 1):
        sharded.complete(unit, [np.ones(6)])
    with pytest.raises(ValueError, match="samples: 0 on every rank"):
        sharded.step(samples=0)
    assert sharded.steps == 0
    for unit in (0, 1):
        sharded.complete(unit, [np.full(6, 2.0)])
    sharded.step(0.5, samples=2)
    for unit in (0, 1):
        with sharded.gathered(unit) as (array,):
            np.testing.assert_array_equal(array, np.full(6, -0.5))


def test_a_plain_communicator_is_wrapped() -> None:
    sharded = ShardedOptimizer(initial(), comm=MPI.COMM_WORLD.Dup())
    assert isinstance(sharded.comm, mpicoll.Intracomm)
    take(sharded, 0, 0.1, 1.0)
    with pytest.raises(TypeError, match="comm: 3 is not an intracommunicator"):
        ShardedOptimizer(initial(), comm=3)  # type: ignore[arg-type]
