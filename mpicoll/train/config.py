"""The options of a training run: one frozen record. No NumPy, no MPI."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mpicoll.errors import UsageError

MODELS = ("mlp", "logistic", "conv")
SCHEDULES = ("cosine", "constant", "step")
DTYPES = ("float32", "float64")
FEEDBACK = {"auto": None, "on": True, "off": False}
PIPELINE_SCHEDULES = ("1f1b", "gpipe")
NOOP = "noop"
"""The algorithm that sends nothing, to see what communication costs."""
MODES = ("sync", "local", "ps", "p2p", "gossip")
ASYNCHRONOUS = ("ps", "p2p", "gossip")
OPTIMIZERS = ("sgd", "momentum", "adagrad", "adam", "adamw")
LEARNING_RATES = {"sgd": 0.1, "momentum": 0.1, "adagrad": 0.01, "adam": 0.001, "adamw": 0.001}
"""Defaults of ``--lr``."""
AVERAGINGS = ("periodic", "elastic")
PUSHES = ("mailbox", "direct")
SILENCES = ("raise", "drop")
SHARDINGS = ("none", "optimizer", "gradients", "parameters")


@dataclass(frozen=True)
class Synthetic:
    """``synthetic:N[xF][xC]``: N samples with F features in C classes."""

    count: int
    features: int = 64
    classes: int = 10


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides a run; ranks must hold equal ones.

    Attributes
    ----------
    batch
        Samples a step over all ranks together.
    hidden, filters
        For the model that has them; empty and 0 otherwise.
    steps
        Stop after so many steps; None for all epochs.
    warmup
        Steps during which the learning rate rises.
    compression
        How gradients are compressed on their way; None if they are not.
    error_feedback
        ``"auto"``, ``"on"`` or ``"off"``: whether what that loses comes with the next step.
    warmup_dense
        Steps at the beginning that are not compressed.
    timeout
        Seconds that a collective may wait for a rank.
    overlap
        ``"auto"``, ``"on"`` or ``"off"``: whether gradients are sent while others are computed.
    accumulate
        A step takes so many batches, one after the other, and communicates after the last.
    clip
        The largest norm of all gradients; None for any.
    shard
        What is divided among the ranks, with all that comes before it in `SHARDINGS`.
    tensor, pipeline
        Ranks that share each layer, and groups of those that share the layers; the rest of the ranks are replicas.
    microbatches
        Parts in which a rank's samples go through the pipeline.
    pipeline_schedule
        When backward passes are taken: ``"1f1b"``, as soon as they can be, or ``"gpipe"``, behind all forward ones.
    mode
        Who waits for whom; in ``"sync"``, everybody for everybody in each step.
    optimizer, beta1, beta2, epsilon
        The update rule, and settings of some; None for their defaults, see :mod:`mpicoll.optim.optimizers`.
    sync_every, averaging
        Of ``"local"``: steps between two averages, and ``"periodic"`` or ``"elastic"``.
    servers, staleness, backup, damping, push, on_silence
        Of ``"ps"``: see :class:`mpicoll.ParameterServer`.
    slow, jitter, step_seconds
        Ranks that are so many times as slow; the mean of a random delay; the least time that gradients take.
    evaluate_every
        Epochs after which the test part is evaluated; the end counts as such in any case.
    tensorboard, run
        The folder of TensorBoard's runs, and this one's name there; None for date and time.
    trace, trace_steps
        The file of the trace, and the steps that it holds: the last ones.
    checkpoint, checkpoint_every, resume
        The folder of checkpoints, after how many steps each is written (None: after every epoch), and whether to begin
        with the newest one: ``"no"``, ``"yes"``, or ``"fallback"`` to take an older one if that is damaged.
    """

    dataset: str = "digits"
    labels: str | None = None
    test_fraction: float = 0.2
    model: str = "mlp"
    hidden: tuple[int, ...] = (256, 128)
    filters: int = 0
    dtype: str = "float32"
    epochs: int = 40
    steps: int | None = None
    batch: int = 64
    lr: float = 0.1
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 5e-4
    warmup: int = 20
    schedule: str = "cosine"
    seed: int = 0
    algorithm: str = "auto"
    bucket_bytes: int = 4 << 20
    compression: str | None = None
    error_feedback: str = "auto"
    warmup_dense: int = 0
    timeout: float = 60.0
    overlap: str = "auto"
    accumulate: int = 1
    clip: float | None = None
    shard: str = "none"
    tensor: int = 1
    pipeline: int = 1
    microbatches: int = 1
    pipeline_schedule: str = "1f1b"
    mode: str = "sync"
    optimizer: str = "momentum"
    beta1: float | None = None
    beta2: float | None = None
    epsilon: float | None = None
    sync_every: int = 16
    averaging: str = "periodic"
    servers: int = 0
    staleness: int | None = None
    backup: int = 0
    damping: bool = False
    push: str = "mailbox"
    on_silence: str = "raise"
    slow: tuple[tuple[int, float], ...] = ()
    jitter: float = 0.0
    step_seconds: float = 0.0
    checkpoint: str | None = None
    checkpoint_every: int | None = None
    resume: str = "no"
    evaluate_every: int = 1
    json: str | None = None
    log_steps: str | None = None
    tensorboard: str | None = None
    run: str | None = None
    plot: str | None = None
    trace: str | None = None
    trace_steps: int = 200
    progress: bool = True
    quiet: bool = False

    @property
    def optimizer_settings(self) -> dict[str, float]:
        """Settings of the optimizer that differ from its defaults."""
        if self.optimizer == "momentum":
            return {"momentum": self.momentum, "nesterov": float(self.nesterov)}
        given = {"beta1": self.beta1, "beta2": self.beta2, "epsilon": self.epsilon}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def is_asynchronous(self) -> bool:
        """True if workers take steps without each other."""
        return self.mode in ASYNCHRONOUS

    @property
    def step_batch(self) -> int:
        """Samples of a step."""
        return self.batch * self.accumulate


def parse_synthetic(text: str) -> Synthetic:
    """Read ``synthetic:N[xF][xC]``.

    Raises
    ------
    UsageError
        If that is not what `text` is, or a number is out of range.
    """
    match = re.fullmatch(r"synthetic:(\d{1,15})(?:x(\d{1,9}))?(?:x(\d{1,5}))?", text)
    if match is None:
        raise UsageError(f"--dataset {text} is not of the form synthetic:N[xF][xC], such as synthetic:10000x64x10")
    found = Synthetic(*(int(number) for number in match.groups() if number is not None))
    if found.count < 2 or found.features < 1 or found.classes < 2:
        raise UsageError(f"--dataset {text} needs at least 2 samples, 1 feature and 2 classes")
    return found
