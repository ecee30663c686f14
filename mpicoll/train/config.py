"""Options of a training run, as a frozen dataclass. Needs neither NumPy nor MPI."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mpicoll.errors import UsageError

MODELS = ("mlp", "logistic", "conv", "alexnet", "transformer")
OWN_MODEL = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
"""Form of the name of a function that returns a model: ``package.module:factory``."""
TASKS = ("classification", "regression", "language_modeling")
SYNTHETIC_TEXT = "synthetic_text"
SCHEDULES = ("cosine", "constant", "step")
BATCH_NORMS = ("none", "synchronized", "local")
DTYPES = ("float32", "float64")
FEEDBACK = {"auto": None, "on": True, "off": False}
PIPELINE_SCHEDULES = ("1f1b", "gpipe")
NOOP = "noop"
"""Name of the algorithm that does not sum gradients, to measure the cost of communication."""
MODES = ("sync", "local", "ps", "p2p", "gossip")
ASYNCHRONOUS = ("ps", "p2p", "gossip")
OPTIMIZERS = ("sgd", "momentum", "adagrad", "adam", "adamw", "lars", "lamb")
LAYERWISE = ("lars", "lamb")
"""Optimizers that need norms of whole arrays."""
WITH_MOMENTUM = ("momentum", "lars")
"""Optimizers that have the setting ``--momentum``."""
LEARNING_RATES = {
    "sgd": 0.1, "momentum": 0.1, "adagrad": 0.01, "adam": 0.001, "adamw": 0.001, "lars": 1.0, "lamb": 0.01,
}  # fmt: skip
"""Defaults of ``--lr``."""
PRECISIONS = ("full", "bfloat16", "float16")
SCALINGS = ("none", "linear", "sqrt")
BASE_BATCH = 64
"""Default of ``--base-batch``."""
AVERAGINGS = ("periodic", "elastic", "final")
GRAPHS = ("exponential", "ring", "complete")
PUSHES = ("mailbox", "direct")
SILENCES = ("raise", "drop")
FAILURES = END, SHRINK = "end", "shrink"
BALANCES = ("equal", "auto")
SHARDINGS = ("none", "optimizer", "gradients", "parameters")


@dataclass(frozen=True)
class Synthetic:
    """``synthetic:N[xF][xC]``: N samples with F features in C classes."""

    count: int
    features: int = 64
    classes: int = 10


@dataclass(frozen=True)
class TrainConfig:
    """All options of a run; they must be equal on all ranks.

    Attributes
    ----------
    batch
        Samples in a batch, over all ranks.
    target
        Names of the columns of a table that are labels or targets; empty for the last one.
    prefetch
        Number of batches that a thread makes ahead; 0 for none.
    share_data
        Whether the ranks of a node hold one copy of a data set together.
    model
        One of `MODELS`, or ``package.module:factory``.
    task
        Kind of prediction and loss, one of `TASKS`.
    hidden, filters
        Widths of the hidden layers of mlp, and number of filters of conv, or of the first convolution of alexnet; empty
        and 0 for other models.
    layers, heads, width, context
        Blocks, heads, elements of a position, and positions of transformer; 0 for other models.
    dropout
        Probability of dropout in alexnet and transformer; 0 for other models.
    batch_norm
        Batch normalisation in mlp and alexnet, one of `BATCH_NORMS`.
    dtype
        Type in which layers compute and parameters are updated, one of `DTYPES`.
    precision
        Type of parameters in the passes and of gradients between ranks, one of `PRECISIONS`; ``"full"`` for `dtype`.
    loss_scale, loss_scale_interval
        First loss scale of float16, and steps without overflow after which it doubles; None for the defaults of
        :mod:`mpicoll.optim.loss_scale`.
    steps
        Number of steps after which the run stops; None for all epochs.
    warmup
        Number of steps over which the learning rate rises.
    compression
        Specification of the compressor of gradients; None for none.
    error_feedback
        ``"auto"``, ``"on"`` or ``"off"``: whether the error of compression is added to the next step.
    warmup_dense
        Number of steps at the start without compression.
    timeout
        Seconds that a collective waits for a rank.
    overlap
        ``"auto"``, ``"on"`` or ``"off"``: whether gradients are sent while others are computed.
    accumulate
        Number of batches in a step, after the last of which gradients are communicated.
    clip
        Largest L2 norm of all gradients together; None for no limit.
    shard
        State that is divided among the ranks, together with all before it in `SHARDINGS`.
    offload
        Folder of files for the optimizer state of sharded strategies; None to keep it in memory.
    recompute
        Number of layers in a segment of which only the input is kept for the backward pass; None to keep all.
    tensor, pipeline
        Number of ranks that share each layer, and number of pipeline stages; the other ranks are replicas.
    microbatches
        Number of micro-batches of a rank's samples in a pipeline.
    pipeline_schedule
        ``"1f1b"``: backward passes as early as possible; ``"gpipe"``: after all forward passes.
    mode
        Mode of synchronisation, one of `MODES`; ``"sync"`` takes each step on all ranks together.
    scale_lr, base_batch
        Rule by which `lr`, meant for `base_batch` samples a step, is scaled to the samples of a step; one of
        `SCALINGS`.
    optimizer, beta1, beta2, epsilon, trust
        Update rule and its settings; None for the rule's defaults, see :mod:`mpicoll.optim.optimizers`.
    sync_every, averaging
        For ``"local"``: steps between two averages, and ``"periodic"``, ``"elastic"`` or ``"final"``.
    graph
        For ``"gossip"``: ranks to which a rank sends, one of `GRAPHS`.
    servers, replicas, staleness, backup, damping, push, pull_compression, on_silence
        For ``"ps"``: see :class:`mpicoll.ParameterServer`.
    on_failure
        ``"end"``: a dead rank ends the run; ``"shrink"``: the others go on without it.
    spares
        Number of ranks, the last ones, that take no part in training until they take the place of dead ones.
    balance
        ``"equal"`` or ``"auto"``: parts of each batch that are equal, or as large as each replica's pace allows.
    slow, jitter, step_seconds
        Artificial stragglers: pairs of a rank and the factor on its time of computation; mean of a random delay in
        seconds; shortest time of the gradients of a step in seconds.
    evaluate_every
        Epochs between evaluations of the test part, which is always evaluated at the end.
    tensorboard, run
        Folder of TensorBoard's runs, and the name of this run there; None for date and time.
    trace, trace_steps
        File of the trace, and number of steps in it, the last ones.
    checkpoint, checkpoint_every, background_checkpoints, resume
        Folder of checkpoints; steps between checkpoints (None: one after every epoch); whether a thread writes them
        while training goes on; and whether to continue from the newest one: ``"no"``, ``"yes"``, or ``"fallback"`` for
        an older one if that is damaged.
    """

    dataset: str = "digits"
    labels: str | None = None
    target: tuple[str, ...] = ()
    test_fraction: float = 0.2
    prefetch: int = 0
    share_data: bool = False
    model: str = "mlp"
    hidden: tuple[int, ...] = (256, 128)
    filters: int = 0
    task: str = "classification"
    layers: int = 0
    heads: int = 0
    width: int = 0
    context: int = 0
    dropout: float = 0.0
    batch_norm: str = "none"
    dtype: str = "float32"
    precision: str = "full"
    loss_scale: float | None = None
    loss_scale_interval: int | None = None
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
    offload: str | None = None
    recompute: int | None = None
    tensor: int = 1
    pipeline: int = 1
    microbatches: int = 1
    pipeline_schedule: str = "1f1b"
    mode: str = "sync"
    optimizer: str = "momentum"
    beta1: float | None = None
    beta2: float | None = None
    epsilon: float | None = None
    trust: float | None = None
    scale_lr: str = "none"
    base_batch: int = BASE_BATCH
    sync_every: int = 16
    averaging: str = "periodic"
    graph: str = "exponential"
    servers: int = 0
    replicas: int = 1
    staleness: int | None = None
    backup: int = 0
    damping: bool = False
    push: str = "mailbox"
    pull_compression: str | None = None
    on_silence: str = "raise"
    on_failure: str = END
    spares: int = 0
    balance: str = "equal"
    slow: tuple[tuple[int, float], ...] = ()
    jitter: float = 0.0
    step_seconds: float = 0.0
    checkpoint: str | None = None
    checkpoint_every: int | None = None
    background_checkpoints: bool = False
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
        momentum = self.momentum if self.optimizer == "lars" else None
        given = {
            "momentum": momentum,
            "trust": self.trust,
            "beta1": self.beta1,
            "beta2": self.beta2,
            "epsilon": self.epsilon,
        }
        return {name: value for name, value in given.items() if value is not None}

    @property
    def counts_hits(self) -> bool:
        """True if predictions are correct or not, so that there is an accuracy."""
        return self.task == "classification"

    @property
    def goes_on(self) -> bool:
        """True if the other ranks go on when one dies."""
        return self.on_failure == SHRINK

    @property
    def is_asynchronous(self) -> bool:
        """True if workers take steps without waiting for each other."""
        return self.mode in ASYNCHRONOUS

    @property
    def step_batch(self) -> int:
        """Samples of a step, over all ranks."""
        return self.batch * self.accumulate


def parse_synthetic(text: str) -> Synthetic:
    """Parse ``synthetic:N[xF][xC]``.

    Raises
    ------
    UsageError
        If `text` has another form, or a number is out of range.
    """
    match = re.fullmatch(r"synthetic:(\d{1,15})(?:x(\d{1,9}))?(?:x(\d{1,5}))?", text)
    if match is None:
        raise UsageError(f"--dataset {text} is not of the form synthetic:N[xF][xC], such as synthetic:10000x64x10")
    found = Synthetic(*(int(number) for number in match.groups() if number is not None))
    if found.count < 2 or found.features < 1 or found.classes < 1:
        raise UsageError(f"--dataset {text} needs at least 2 samples, 1 feature, and 2 classes or 1 target")
    return found


def is_text(dataset: str) -> bool:
    """Return True if `dataset` is ``text:PATH`` or ``synthetic_text[:N]``."""
    return dataset.startswith("text:") or dataset.partition(":")[0] == SYNTHETIC_TEXT


def is_idx(name: str) -> bool:
    """Return True for the name of an IDX file, such as ``train-images-idx3-ubyte.gz``."""
    return re.search(r"(idx\d|\.idx|ubyte)(\.gz)?$", name) is not None


def is_parts(dataset: str) -> bool:
    """Return True if `dataset` is a pattern of files, a table, or an IDX file: files that ranks divide among them."""
    if is_text(dataset) or dataset.startswith("synthetic:"):
        return False
    return any(letter in dataset for letter in "*?[") or dataset.endswith((".csv", ".parquet")) or is_idx(dataset)


def parse_synthetic_text(text: str) -> int:
    """Parse ``synthetic_text[:N]``; return N, the number of bytes, 100000 by default.

    Raises
    ------
    UsageError
        If `text` has another form, or the number is out of range.
    """
    match = re.fullmatch(rf"{SYNTHETIC_TEXT}(?::(\d{{1,9}}))?", text)
    if match is None or (match[1] is not None and int(match[1]) < 2):
        raise UsageError(f"--dataset {text} is not of the form {SYNTHETIC_TEXT}[:N] with N of at least 2 bytes")
    return int(match[1] or 100_000)
