"""Arguments of Horovod's allreduce, and the end of Horovod's interface."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from mpi4py import MPI

import mpicoll.torch as hvd
from mpicoll.errors import RemoteError
from mpicoll.torch import world

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("initialized")]
RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
TOTAL = SIZE * (SIZE + 1) / 2


def in_background(start: Any) -> Any:
    return lambda *arguments, **named: hvd.synchronize(start(*arguments, **named))


CALLS = {
    "allreduce": hvd.allreduce,
    "allreduce_": hvd.allreduce_,
    "allreduce_async": in_background(hvd.allreduce_async),
    "allreduce_async_": in_background(hvd.allreduce_async_),
}
FORMS = pytest.mark.parametrize("name", CALLS)


@FORMS
def test_the_second_argument_is_average(name: str) -> None:
    for average, wanted in ((False, TOTAL), (True, TOTAL / SIZE), (None, TOTAL / SIZE)):
        assert CALLS[name](torch.tensor([RANK + 1.0]), average).item() == pytest.approx(wanted)
    assert CALLS[name](torch.tensor([RANK + 1.0]), average=False, name="loss").item() == TOTAL


@FORMS
def test_the_order_of_arguments_is_that_of_horovod(name: str) -> None:
    order = ["tensor", "average", "name", "op", "prescale_factor", "postscale_factor"]
    if name == "allreduce":
        order.insert(3, "compression")
    parameters = inspect.signature(getattr(hvd, name)).parameters.values()
    assert [each.name for each in parameters if each.kind != each.KEYWORD_ONLY] == order
    names = list(inspect.signature(hvd.DistributedOptimizer).parameters.values())
    assert [each.name for each in names if each.kind != each.KEYWORD_ONLY] == [
        "optimizer", "named_parameters", "compression", "backward_passes_per_step", "op",
    ]  # fmt: skip


@FORMS
def test_scaling_before_and_after(name: str) -> None:
    given = torch.tensor([RANK + 1.0, -1.0])
    found = CALLS[name](given, op=hvd.Max, prescale_factor=-2.0, postscale_factor=0.5)
    assert found.tolist() == [-1.0, 1.0]
    assert (given[1] == -1) == (not name.endswith("_"))
    with pytest.raises(ValueError, match=r"postscale_factor: 0.5 with a tensor of torch.int32"):
        CALLS[name](torch.ones(1, dtype=torch.int32), op=hvd.Sum, postscale_factor=0.5)


@FORMS
def test_wrong_averages(name: str) -> None:
    with pytest.raises(TypeError, match="average: 'loss' is neither a bool nor None"):
        CALLS[name](torch.ones(1), "loss")
    with pytest.raises(ValueError, match="average: True together with op"):
        CALLS[name](torch.ones(1), True, op=hvd.Sum)
    assert CALLS[name](torch.ones(1), False).item() == SIZE  # calls still belong together
    if SIZE > 1:
        with pytest.raises(TypeError if RANK == 0 else RemoteError, match="average: 1 is neither"):
            CALLS[name](torch.ones(1), 1 if RANK == 0 else None)


def test_shutdown_frees_the_communicator() -> None:
    comm = world.world().comm
    hvd.allreduce_async(torch.ones(5)).wait()
    hvd.shutdown()
    assert comm == MPI.COMM_NULL
    hvd.shutdown()  # nothing happens
    hvd.init()
    assert hvd.allreduce(torch.ones(1), False).item() == SIZE


@pytest.mark.mpi(min_size=2)
def test_shutdown_without_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others do not wait for it, and it does not wait for them."""
    monkeypatch.setattr(world, "_CLOSE_SECONDS", 0.2)
    comm = world.world().comm
    if RANK:
        hvd.shutdown()
    MPI.COMM_WORLD.Barrier()
    if RANK == 0:
        hvd.shutdown()
    assert comm != MPI.COMM_NULL
    hvd.init()
    assert hvd.allreduce(torch.ones(1), False).item() == SIZE
