"""Prediction of training on numbers of hosts: a row for each number and each compressor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from mpicoll.compression.codec_speed import known
from mpicoll.data.datasets import Dataset
from mpicoll.errors import UsageError
from mpicoll.models.sequential import Model
from mpicoll.predict.crossover import two_shot_codec
from mpicoll.predict.predictor import PredictedCase, blocks, extrapolates
from mpicoll.schedules.machine import IDENTITY, MachineDescription, Wire
from mpicoll.train.config import TrainConfig
from mpicoll.train.prediction.step_recording import mean_step, overlapping, record_steps
from mpicoll.train.prediction.step_replay import SimulatedPricing, StepTime

MARGIN = 1.05
"""Factor on the samples a second of uncompressed training from which compression wins."""


class PredictedHosts(NamedTuple):
    """Predicted training on a number of hosts.

    Attributes
    ----------
    hosts, ranks
        Numbers of hosts and of ranks.
    compression
        Specification of the compressor; None for none.
    batch
        Samples of a step, over all ranks.
    time
        Mean time of a step.
    extrapolates
        Reason why the machine's measurements say nothing of these hosts; empty if they do.
    """

    hosts: int
    ranks: int
    compression: str | None
    batch: int
    time: StepTime
    extrapolates: str

    @property
    def samples_per_second(self) -> float:
        """Training samples of all ranks a second."""
        return self.batch / self.time.seconds

    @property
    def efficiency(self) -> float:
        """Samples a second over those of as many ranks that communicate nothing."""
        return self.time.computation / self.time.seconds


@dataclass(frozen=True)
class TrainingCase:
    """Training whose steps are predicted.

    Attributes
    ----------
    config
        Options of the trainer.
    machine
        Machine of the hosts.
    hosts
        Numbers of hosts.
    ranks_per_node
        Ranks on each host.
    compressions
        Specifications of compressors; None for none.
    weak
        True if the batch of `config` is that of one rank, False if all ranks share it.
    seconds
        Approximate seconds for which steps are taken for each row.
    """

    config: TrainConfig
    machine: MachineDescription
    hosts: tuple[int, ...]
    ranks_per_node: int = 1
    compressions: tuple[str | None, ...] = (None,)
    weak: bool = False
    seconds: float = 1.0

    def options(self, ranks: int, compression: str | None = None) -> TrainConfig:
        """Return the options of a run on `ranks` ranks."""
        batch = self.config.batch * (ranks if self.weak else 1)
        config = replace(self.config, batch=batch, compression=compression)
        return overlapping(config, between_hosts=ranks > self.ranks_per_node)


def check(config: TrainConfig) -> None:
    """Refuse options of the trainer whose steps are not predicted.

    Raises
    ------
    UsageError
        If there is such an option.
    """
    if config.is_asynchronous:
        raise UsageError("--training: only strategies in which ranks take steps together, and local, are predicted")
    refused = {
        f"--tensor {config.tensor}": config.tensor > 1,
        f"--pipeline {config.pipeline}": config.pipeline > 1,
        "--offload": config.offload is not None,
        "--share-data": config.share_data,
        "--slow": bool(config.slow),
        "--balance auto": config.balance == "auto",
        f"--algorithm {config.algorithm}": config.algorithm != "auto",
        "--checkpoint": config.checkpoint is not None,
        "--trace": config.trace is not None,
        "--tensorboard": config.tensorboard is not None,
        "--log-steps": config.log_steps is not None,
    }
    for option, given in refused.items():
        if given:
            raise UsageError(f"--training is not for {option}")


def predict_training(
    case: TrainingCase, dataset: Dataset, model: Model, note: Callable[[str], None] = lambda text: None
) -> list[PredictedHosts]:
    """Return a row for each compressor and number of hosts.

    Computation is measured in this process, for the share of one rank; see
    :func:`~mpicoll.train.prediction.step_recording.record_steps`.

    Parameters
    ----------
    note
        Function that is told what is measured next.

    Raises
    ------
    UsageError, TrainingError, ValueError
        If options cannot be predicted, or steps fail.
    """
    wires = {spec: IDENTITY if spec is None else known(two_shot_codec(spec)) for spec in case.compressions}
    alone: StepTime | None = None
    rows = []
    for spec, wire in wires.items():
        for hosts in case.hosts:
            note(f"{hosts} hosts, {spec or 'uncompressed'}")
            ranks = hosts * case.ranks_per_node
            config = case.options(ranks, spec)
            # One rank communicates nothing, with a compressor or without.
            time = alone if ranks == 1 and alone else _step(case, config, dataset, model, ranks, wire)
            alone = time if ranks == 1 else alone
            rows.append(PredictedHosts(hosts, ranks, spec, config.step_batch, time, _beyond(case, ranks)))
    return rows


def _step(case: TrainingCase, config: TrainConfig, dataset: Dataset, model: Model, ranks: int, wire: Wire) -> StepTime:
    groups = record_steps(config, dataset, model, ranks, case.seconds)
    return mean_step(groups, SimulatedPricing(case.machine, blocks(ranks, case.ranks_per_node), wire))


def _beyond(case: TrainingCase, ranks: int) -> str:
    """Return why the machine's measurements say nothing of a number of ranks; empty on one rank."""
    fitted = case.machine.fitted
    if ranks == 1:
        return ""
    nbytes = fitted.max_nbytes if fitted is not None else 0
    return extrapolates(case.machine, PredictedCase("allreduce", blocks(ranks, case.ranks_per_node), nbytes))


def wins_from(rows: Sequence[PredictedHosts], compression: str) -> int | None:
    """Return the number of hosts from which on a compressor wins on all larger numbers, too; None if there is none.

    Parameters
    ----------
    rows
        Those of `compression` and of uncompressed training on the same numbers of hosts.
    """
    plain = {row.hosts: row.samples_per_second for row in rows if row.compression is None}
    packed = {row.hosts: row.samples_per_second for row in rows if row.compression == compression}
    found = None
    for hosts in sorted(packed):
        found = (found or hosts) if packed[hosts] > MARGIN * plain[hosts] else None
    return found


def as_json(case: TrainingCase, rows: Sequence[PredictedHosts], parameters: int) -> dict[str, Any]:
    """Return the prediction as a value for a JSON file; times in seconds."""
    return {
        "machine": case.machine.name,
        "ranks_per_node": case.ranks_per_node,
        "parameter_count": parameters,
        "rows": [
            {
                **{name: value for name, value in row._asdict().items() if name != "time"},
                **{f"{name}_seconds": value for name, value in row.time._asdict().items()},
                "step_seconds": row.time.seconds,
                "samples_per_second": row.samples_per_second,
            }
            for row in rows
        ],
        "compression_wins_from_hosts": {spec: wins_from(rows, spec) for spec in case.compressions if spec is not None},
    }
