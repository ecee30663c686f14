"""Memory until the first step: a rank makes no more of a sharded model than it holds, and refuses what does not fit."""

import math
import resource
from pathlib import Path

import pytest

from mpicoll import Intracomm
from mpicoll.errors import ModelTooLarge
from mpicoll.train import memory_check, training_run
from mpicoll.train.available_memory import MemoryLimit
from mpicoll.train.loop import Loop
from mpicoll.train.options import parse
from tests import extent

pytestmark = pytest.mark.mpi
MEGABYTE, LAYERS, WIDTH = 1 << 20, 30, 1024
WHOLE = LAYERS * WIDTH * WIDTH * 4
OVERHEAD = 32 * MEGABYTE
"""Kernels, memory of collectives, and activations."""


def memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


class Watch(training_run.Observer):
    """Takes the largest resident memory until the first step."""

    peak = held = 0

    def began(self, loop: Loop) -> None:
        self.peak, self.held = memory("VmHWM"), sum(loop.strategy.nbytes().values())


def run(comm: Intracomm, strategy: str, watch: Watch | None = None) -> dict:
    hidden = ",".join([str(WIDTH)] * LAYERS)
    words = f"--hidden {hidden} --dataset synthetic:64x32x4 --batch 16 --steps 1 --warmup 0 --lr 0.001 --quiet"
    return training_run.run(parse([*words.split(), "--strategy", strategy]), comm, observer=watch)


@pytest.mark.parametrize("strategy", extent.first(2, ["sharded", "sharded_gradients", "sharded_optimizer"]))
def test_start_up_stays_within_the_steady_state_and_a_layer(comm: Intracomm, strategy: str) -> None:
    if comm.size < 3:
        pytest.skip("the whole model must be more than the steady state and what else is needed")
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak to what is resident now
    before, watch = memory("VmRSS"), Watch()
    run(comm, strategy, watch)
    assert watch.peak - before < 1.1 * watch.held + WIDTH * WIDTH * 4 + OVERHEAD
    if strategy == "sharded":
        assert watch.peak - before < WHOLE


def test_a_limit_on_memory_refuses_replicas_and_lets_shards_train(
    comm: Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    if comm.size < 4:
        pytest.skip("needs four ranks for a third of the memory")
    room = 3 * WHOLE // 4 if comm.size >= 8 else WHOLE  # a quarter, or a third, of what replicas need
    limits, make_loop = resource.getrlimit(resource.RLIMIT_AS), training_run.make_loop

    def limited(*arguments: object) -> Loop:
        allowed = memory("VmSize") + room + OVERHEAD
        resource.setrlimit(resource.RLIMIT_AS, (allowed, limits[1]))
        return make_loop(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(training_run, "make_loop", limited)
    try:
        with pytest.raises(
            ModelTooLarge, match=r"take 3\d\d MB on rank 0 .*--strategy replicated.*sharded divides them"
        ):
            run(comm, "replicated")
        assert math.isfinite(run(comm, "sharded")["train_loss"])
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.parametrize("name", extent.first(1, ["machine_limit", "group_limit"]))
def test_ranks_that_share_memory_need_it_together(comm: Intracomm, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    if comm.size < 2:
        pytest.skip("two ranks")
    # Enough for each rank of the first half alone; the second half has a machine or a group of its own.
    far, half = comm.rank >= (comm.size + 1) // 2, (comm.size + 1) // 2
    limit = MemoryLimit("the node", 2 if far else 1, 1 << 40 if far else 5 * WHOLE // 2 * half)
    monkeypatch.setattr(memory_check, name, lambda: limit)
    ranks = "rank 0" if half == 1 else f"{half} ranks, from rank 0 on,"
    with pytest.raises(ModelTooLarge, match=f"on {ranks} with --strategy replicated, and the memory of the node"):
        run(comm, "replicated")
    enough = MemoryLimit("the node", limit.key, 1 << 40)
    monkeypatch.setattr(memory_check, name, lambda: enough)
    assert math.isfinite(run(comm, "sharded")["train_loss"])
