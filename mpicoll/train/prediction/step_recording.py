"""Recording of steps of training, as rank 0 of many takes them: with its share of the samples and of the state."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from mpicoll.data.datasets import Dataset
from mpicoll.errors import UsageError
from mpicoll.models.sequential import Model
from mpicoll.parallel.mesh import Mesh
from mpicoll.parallel.model_shard import ModelShard
from mpicoll.quantities import counted
from mpicoll.train.assembly import assemble_loop
from mpicoll.train.clock import Clock
from mpicoll.train.config import TrainConfig
from mpicoll.train.prediction.recorded_collectives import RecordedCommunicator, RecordedStep
from mpicoll.train.prediction.step_replay import Pricing, StepTime, replay

_WARM_STEPS = 2
_LEAST_STEPS, _MOST_STEPS = 8, 400
_RATE = 1e-6
"""Learning rate of recorded steps, which take as long at any rate and must not diverge."""
_ENOUGH_EPOCHS = 1 << 20


class StepGroup(list[RecordedStep]):
    """Recorded steps that are alike; `weight` is the fraction of a run's steps that are as these.

    Local SGD has two groups: steps after which replicas are averaged, and the others.
    """

    def __init__(self, steps: Iterable[RecordedStep], weight: float) -> None:
        super().__init__(steps)
        self.weight = weight

    def quartiles(self) -> tuple[float, float, float]:
        """Return the quartiles of the steps' seconds of computation."""
        first, median, third = statistics.quantiles(map(computed, self), n=4, method="inclusive")
        return first, median, third

    def scaled(self, factor: float) -> StepGroup:
        """Return these steps with `factor` times their computation."""
        steps = [
            RecordedStep(
                tuple(event._replace(computed=factor * event.computed) for event in step.events),
                factor * step.computed,
            )
            for step in self
        ]
        return StepGroup(steps, self.weight)

    def mean(self, pricing: Pricing) -> StepTime:
        """Return the median of the seconds of computation, and the means of those of communication and of waiting."""
        times = [replay(step, pricing) for step in self]
        return StepTime(
            statistics.median(each.computation for each in times),
            statistics.fmean(each.communication for each in times),
            statistics.fmean(each.waiting for each in times),
        )


def computed(step: RecordedStep) -> float:
    """Return the seconds that the rank computed in a step."""
    return sum(event.computed for event in step.events) + step.computed


class SharedComputation(NamedTuple):
    """Records of the same computation with different compressors.

    Attributes
    ----------
    records
        Groups of steps of each compressor, all with the same median computation.
    spread
        Third quartile of the computation of a step over the first one, where these are farthest apart.
    """

    records: list[list[StepGroup]]
    spread: float


def share_computation(records: Sequence[Sequence[StepGroup]]) -> SharedComputation:
    """Return records of each compressor with the computation of the one whose steps computed for the least time.

    Ranks compute as much with a compressor as without, since pricing has the time that it takes. What differs between
    records is the other load of the machine, which only adds to a time.
    """
    made: list[list[StepGroup]] = [[] for _ in records]
    spread = 1.0
    for alike in zip(*records, strict=True):
        quartiles = [group.quartiles() for group in alike]
        least = min(median for _, median, _ in quartiles)
        spread = max(spread, max(third for *_, third in quartiles) / min(first for first, *_ in quartiles))
        for groups, group, (_, median, _) in zip(made, alike, quartiles, strict=True):
            groups.append(group.scaled(least / median))
    return SharedComputation(made, spread)


def mean_step(groups: Sequence[StepGroup], pricing: Pricing) -> StepTime:
    """Return the mean time of a run's steps."""
    means = [(group.weight, group.mean(pricing)) for group in groups]
    return StepTime(*(sum(weight * time[place] for weight, time in means) for place in range(len(StepTime._fields))))


def overlapping(config: TrainConfig, *, between_hosts: bool) -> TrainConfig:
    """Return options in which ``--overlap auto`` is replaced by what it stands for on ranks of one host or of several.

    Sharded parameters decide for themselves, as :mod:`mpicoll.train.assembly` does.
    """
    if config.overlap != "auto" or config.shard == "parameters":
        return config
    return replace(config, overlap="on" if between_hosts else "off")


def record_steps(config: TrainConfig, dataset: Dataset, model: Model, ranks: int, seconds: float) -> list[StepGroup]:
    """Take steps for about `seconds` as rank 0 of `ranks`, and return what they have computed and communicated.

    Parameters
    ----------
    config
        Options of a strategy in which ranks take steps together; `batch` is that of all ranks.

    Raises
    ------
    UsageError
        If the data set has fewer samples than a step.
    TrainingError
        If steps fail, for instance since the loss is not finite.
    """
    if dataset.train.count < config.step_batch:
        raise UsageError(
            f"--batch: a step of {counted(ranks, 'rank')} takes {counted(config.step_batch, 'sample')}, and "
            f"{config.dataset} has {dataset.train.count} for training"
        )
    every = None if config.mode != "local" or config.averaging == "final" else config.sync_every
    period = 1 if every is None else min(every, 2)
    steps = _steps(_made_to_record(config, period), dataset, model, RecordedCommunicator(ranks), seconds)
    if every is None or period == 1:
        return [StepGroup(steps.values(), 1.0)]
    averaging = [step for number, step in steps.items() if (number + 1) % period == 0]
    others = [step for number, step in steps.items() if (number + 1) % period]
    return [StepGroup(averaging, 1 / every), StepGroup(others, 1 - 1 / every)]


def _made_to_record(config: TrainConfig, period: int) -> TrainConfig:
    """Return options of a run that goes on as long as it is recorded."""
    every = period if config.mode == "local" and config.averaging != "final" else config.sync_every
    return replace(
        config, sync_every=every, epochs=_ENOUGH_EPOCHS, steps=None, lr=_RATE, scale_lr="none", warmup_dense=0
    )


def _steps(
    config: TrainConfig, dataset: Dataset, model: Model, comm: RecordedCommunicator, seconds: float
) -> dict[int, RecordedStep]:
    """Return records of whole batches by the number of the step, without the first steps."""
    mesh = Mesh(comm, comm, 0, comm.Get_size())
    portion = ModelShard(model, mesh, (dataset.feature_count,))
    found: dict[int, RecordedStep] = {}
    with np.errstate(all="ignore"):
        loop = assemble_loop(config, mesh, dataset, model, portion, Clock())
        until = time.perf_counter() + seconds
        for share in loop.coordination.shares():
            if len(found) >= _LEAST_STEPS and (time.perf_counter() > until or len(found) >= _MOST_STEPS):
                break
            comm.begin()
            loop.take_step(share)
            step = comm.end()
            if share.step >= _WARM_STEPS and loop.step_plan.batch_count(share.step) == config.step_batch:
                found[share.step] = step
        loop.close()
    return found
