"""Prediction of training on numbers of hosts: a row for each number and each compressor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from mpicoll.compression.codec_speed import known
from mpicoll.data.datasets import Dataset
from mpicoll.errors import UsageError
from mpicoll.models.sequential import Model
from mpicoll.predict.crossover import two_shot_codec
from mpicoll.predict.predictor import PredictedCase, blocks, extrapolates
from mpicoll.quantities import counted
from mpicoll.schedules.machine import IDENTITY, MachineDescription, Wire
from mpicoll.train.config import TrainConfig
from mpicoll.train.prediction.step_recording import mean_step, overlapping, record_steps, share_computation
from mpicoll.train.prediction.step_replay import SimulatedPricing, StepTime

MARGIN = 1.05
"""Factor on the samples a second of uncompressed training from which compression wins."""
_LARGE_SPREAD = 1.5
"""Factor between measurements of computation that is told; on an idle machine it is below 1.2."""


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
    spread
        Spread of the measured computation, see :class:`~mpicoll.train.prediction.step_recording.SharedComputation`.
    """

    hosts: int
    ranks: int
    compression: str | None
    batch: int
    time: StepTime
    extrapolates: str
    spread: float = 1.0

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
        Approximate seconds for which steps are taken for each number of hosts and compressor.
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
    :func:`~mpicoll.train.prediction.step_recording.record_steps`. It is the same with all compressors.

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
    rows = [row for hosts in case.hosts for row in _rows(case, hosts, wires, dataset, model, note)]
    return [row for spec in wires for row in rows if row.compression == spec]


def _rows(
    case: TrainingCase,
    hosts: int,
    wires: Mapping[str | None, Wire],
    dataset: Dataset,
    model: Model,
    note: Callable[[str], None],
) -> list[PredictedHosts]:
    """Return the rows of a number of hosts, one for each compressor."""
    ranks = hosts * case.ranks_per_node
    records = []
    for spec in wires if ranks > 1 else [None]:  # one rank communicates nothing, with a compressor or without
        note(f"{counted(hosts, 'host')}, {spec or 'uncompressed'}")
        records.append(record_steps(case.options(ranks, spec), dataset, model, ranks, case.seconds))
    shared = share_computation(records)
    records = shared.records if ranks > 1 else shared.records * len(wires)
    rows = []
    for (spec, wire), groups in zip(wires.items(), records, strict=True):
        time = mean_step(groups, SimulatedPricing(case.machine, blocks(ranks, case.ranks_per_node), wire))
        batch = case.options(ranks, spec).step_batch
        rows.append(PredictedHosts(hosts, ranks, spec, batch, time, _beyond(case, ranks), shared.spread))
    return rows


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


def doubts(rows: Sequence[PredictedHosts]) -> dict[int, float]:
    """Return factors by which computation is uncertain, by the number of hosts; without those that are small.

    A factor is that between repetitions, or that to the computation on fewer hosts: each of more ranks computes as
    much, or less.
    """
    found: dict[int, float] = {}
    least = float("inf")
    for row in sorted(rows, key=lambda row: row.hosts):
        least = min(least, row.time.computation)
        factor = max(row.spread, row.time.computation / least if least else 1.0)
        if factor > _LARGE_SPREAD:
            found[row.hosts] = max(factor, found.get(row.hosts, 0.0))
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
