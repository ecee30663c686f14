"""Checks for contradicting options, and defaults that depend on others. No MPI; NumPy only for ``--compression``."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from mpicoll.errors import UsageError
from mpicoll.quantities import alternatives
from mpicoll.train.config import (
    ASYNCHRONOUS,
    BASE_BATCH,
    LAYERWISE,
    LEARNING_RATES,
    NOOP,
    PIPELINE_SCHEDULES,
    SHRINK,
    WITH_MOMENTUM,
    TrainConfig,
)
from mpicoll.train.model_checks import check_data, check_model, check_tensor_and_pipeline
from mpicoll.train.strategies import STRATEGIES, strategy_name

if TYPE_CHECKING:
    from mpicoll.compression import Compressor

_MICROBATCHES = 4
DEFAULTS = {field.name: field.default for field in fields(TrainConfig)}
_OF_MODES = {
    "sync_every": "local",
    "averaging": "local",
    "graph": "gossip",
    "servers": "ps",
    "replicas": "ps",
    "staleness": "ps",
    "backup": "ps",
    "damping": "ps",
    "push": "ps",
    "pull_compression": "ps",
    "on_silence": "ps",
}
"""Options that one mode alone has, and this mode."""
_OF_SOME = ("momentum", "bucket_bytes")
"""Options that are refused where they have no effect, and have the same default everywhere."""
LATER = (
    "mode", "shard", "lr", "base_batch", "optimizer", "dataset", "task", "hidden", "filters", "layers", "heads",
    "width", "context", "dropout", "microbatches", "pipeline_schedule", "resume", "slow",
    *_OF_SOME, *_OF_MODES,
)  # fmt: skip
"""Options whose defaults depend on other options."""


def complete(options: dict[str, Any]) -> None:
    """Check options against each other, and fill in defaults that depend on others, in place.

    Raises
    ------
    UsageError
        If options contradict each other.
    """
    _expand_strategy(options)
    check_model(options)
    check_data(options)
    check_tensor_and_pipeline(options)
    _check_precision(options)
    _check_compression(options)
    _check_sharing(options)
    _check_optimizer(options)
    _check_mode(options)
    _check_checkpoints(options)
    _check_output(options)
    for name in _OF_SOME:
        options[name] = DEFAULTS[name] if options[name] is None else options[name]


def _expand_strategy(options: dict[str, Any]) -> None:
    """Replace the strategy's name by its mode and sharding."""
    name = options.pop("strategy")
    for older in ("mode", "shard"):
        if name is not None and options[older] is not None:
            raise UsageError(f"--{older} is an older name of --strategy; give one of them")
    if name is not None:
        options["mode"], options["shard"] = STRATEGIES[name]
    options["mode"], options["shard"] = options["mode"] or "sync", options["shard"] or "none"


def _check_optimizer(options: dict[str, Any]) -> None:
    mode = options["mode"]
    adapts = options["model"] == "transformer" and mode in ("sync", "local")
    name: str = options["optimizer"] or ("adamw" if adapts else "momentum")
    options["optimizer"] = name
    if options["lr"] is None:
        options["lr"] = LEARNING_RATES[name]
    if mode == "gossip" and name != "momentum":
        raise UsageError(f"--optimizer {name} is not for --strategy gossip, which supports momentum only")
    if mode in ("ps", "p2p") and (name == "adamw" or name in LAYERWISE):
        raise UsageError(f"--optimizer {name} is not for --strategy {strategy_name(mode)}")
    _check_whole_arrays(options)
    moments = ("adam", "adamw", "lamb")
    settings = {
        "momentum": WITH_MOMENTUM,
        "trust": ("lars",),
        "beta1": moments,
        "beta2": moments,
        "epsilon": ("adagrad", *moments),
    }
    for setting, owners in settings.items():
        if options[setting] is not None and name not in owners:
            raise UsageError(f"--{setting} is for --optimizer {alternatives(owners)}, not {name}")
    if options["base_batch"] is not None and options["scale_lr"] == "none":
        raise UsageError("--base-batch has no meaning without --scale-lr")
    options["base_batch"] = options["base_batch"] or BASE_BATCH
    if options["nesterov"] and (name != "momentum" or options["momentum"] == 0):
        raise UsageError("--nesterov needs --optimizer momentum and a --momentum above 0")


def _check_whole_arrays(options: dict[str, Any]) -> None:
    """Refuse optimizers that need norms of whole arrays where ranks hold parts of them."""
    name = options["optimizer"]
    if name not in LAYERWISE:
        return
    if options["tensor"] > 1:
        raise UsageError(f"--optimizer {name} is not for --tensor, where ranks hold parts of arrays")


def _check_compression(options: dict[str, Any]) -> None:
    if options["compression"] == "none":
        options["compression"] = None
    if options["pull_compression"] == "none":
        options["pull_compression"] = None
    spec, feedback = options["compression"], options["error_feedback"]
    if spec is None:
        if feedback != "auto" or options["warmup_dense"]:
            name = "--warmup-dense" if feedback == "auto" else "--error-feedback"
            raise UsageError(f"{name} has no meaning without --compression")
        return
    made = _checked_compressor("--compression", spec, options["dtype"])
    if feedback == "on" and made.unbiased:
        raise UsageError(f"--error-feedback on is not for --compression {spec}, which is unbiased")


def _checked_compressor(option: str, spec: str, dtype: str) -> Compressor:
    from mpicoll.compression import compressor

    if spec.strip().split(":")[0] == "auto":
        raise UsageError(
            f"{option} {spec}: auto compresses where measured times say so, on which results of training must not "
            "depend; name a compressor"
        )
    try:
        made = compressor(spec)
    except ValueError as error:
        raise UsageError(f"{option}{str(error).removeprefix('compression')}") from None
    if dtype != "float32":
        raise UsageError(f"{option} is for --dtype float32, not {dtype}")
    return made


def _check_pull_compression(options: dict[str, Any]) -> None:
    spec = options["pull_compression"]
    if spec is None:
        return
    from mpicoll.compression.error_feedback import delta_refusal

    if reason := delta_refusal(_checked_compressor("--pull-compression", spec, options["dtype"])):
        raise UsageError(f"--pull-compression {spec} {reason}")


def _check_precision(options: dict[str, Any]) -> None:
    kind = options["precision"]
    for name in ("loss_scale", "loss_scale_interval"):
        if options[name] is not None and kind != "float16":
            raise UsageError(f"--{name.replace('_', '-')} is for --precision float16, not {kind}")
    if kind == "full":
        return
    if options["dtype"] != "float32":
        raise UsageError(f"--precision {kind} is for --dtype float32, not {options['dtype']}")
    if options["mode"] != "sync":
        raise UsageError(f"--precision {kind} is not for --strategy {strategy_name(options['mode'])}")
    if options["compression"] not in (None, "none"):
        raise UsageError(f"--compression is not for --precision {kind}, whose gradients have 16 bits")
    if options["algorithm"] == "native":
        raise UsageError(f"--algorithm native is not for --precision {kind}, a type that MPI does not have")


def _check_sharing(options: dict[str, Any]) -> None:
    sharded, pipeline = options["shard"] != "none", options["pipeline"]
    if sharded and options["compression"] is not None:
        _check_compressed_chunks(options)
    if options["offload"] is not None and not sharded:
        name = strategy_name(options["mode"], options["shard"])
        raise UsageError(f"--offload is for sharded strategies, not --strategy {name}")
    for name in ("slow", "jitter", "step_seconds"):
        if options[name] and pipeline > 1:
            raise UsageError(f"--{name.replace('_', '-')} is not for --pipeline, whose stages wait for each other")
    for name in ("microbatches", "pipeline_schedule"):
        if options[name] is not None and pipeline == 1:
            raise UsageError(f"--{name.replace('_', '-')} has no meaning without --pipeline")
    options["pipeline_schedule"] = options["pipeline_schedule"] or PIPELINE_SCHEDULES[0]
    if options["microbatches"] is None:
        options["microbatches"] = _MICROBATCHES if pipeline > 1 else 1


def _check_compressed_chunks(options: dict[str, Any]) -> None:
    """Refuse compressors that cannot encode the gradients of one rank's chunk by themselves."""
    from mpicoll.compression import compressor
    from mpicoll.parallel.compressed_chunks import refusal

    spec, name = options["compression"], strategy_name(options["mode"], options["shard"])
    if options["error_feedback"] == "on":
        raise UsageError(f"--error-feedback on is not for --strategy {name}, which keeps no residuals")
    if reason := refusal(compressor(spec)):
        raise UsageError(f"--compression {spec} is not for --strategy {name}: it {reason}")


def _check_checkpoints(options: dict[str, Any]) -> None:
    for name in ("checkpoint_every", "background_checkpoints", "resume"):
        if options[name] not in (None, False) and options["checkpoint"] is None:
            raise UsageError(f"--{name.replace('_', '-')} has no meaning without --checkpoint FOLDER")
    options["resume"] = options["resume"] or "no"
    if options["on_failure"] == SHRINK:
        _check_shrinking(options)
        return
    for name in ("spares", "replicas"):
        if options[name] != DEFAULTS[name]:
            raise UsageError(f"--{name} {options[name]} has no meaning without --on-failure shrink")


def _check_shrinking(options: dict[str, Any]) -> None:
    """Refuse what a run that goes on without dead ranks could not keep: state that one rank alone holds."""
    name, served = strategy_name(options["mode"], options["shard"]), options["mode"] == "ps"
    if name not in ("replicated", "parameter_server"):
        raise UsageError(
            f"--on-failure shrink is for --strategy replicated or parameter_server, not {name}: a dead rank's part of "
            "the state is lost; use python -m mpicoll.train.supervise, which starts the job again from a checkpoint"
        )
    kept = {
        "--tensor": options["tensor"] > 1,
        "--pipeline": options["pipeline"] > 1,
        f"--compression {options['compression']}": options["compression"] is not None and not served,
        "--push direct": options["push"] == "direct",
        "--on-silence drop": options["on_silence"] == "drop",
        f"--spares {options['spares']} with --strategy parameter_server": served and options["spares"] > 0,
        f"--precision {options['precision']}": options["precision"] != "full",
        f"--batch-norm {options['batch_norm']}": options["batch_norm"] != "none",
        "--balance auto": options["balance"] == "auto",
        "--algorithm noop": options["algorithm"] == NOOP,
        "--background-checkpoints": options["background_checkpoints"],
        "--share-data": options["share_data"],
        "--trace": options["trace"] is not None,
    }
    for option, given in kept.items():
        if given:
            raise UsageError(f"--on-failure shrink is not for {option}")


def _check_output(options: dict[str, Any]) -> None:
    if options["run"] is not None and options["tensorboard"] is None:
        raise UsageError("--run has no meaning without --tensorboard FOLDER")
    if options["trace_steps"] != DEFAULTS["trace_steps"] and options["trace"] is None:
        raise UsageError("--trace-steps has no meaning without --trace FILE.json")
    if options["algorithm"] == NOOP:
        if options["checkpoint"] is not None:
            raise UsageError("--checkpoint is not for --algorithm noop, which does not train a common model")
        if options["shard"] != "none" or options["tensor"] * options["pipeline"] > 1:
            raise UsageError(
                "--algorithm noop is for --strategy replicated, not for sharded strategies, --tensor or --pipeline"
            )


def _check_mode(options: dict[str, Any]) -> None:
    mode = options["mode"]
    if options["averaging"] == "final" and options["sync_every"] is not None:
        raise UsageError("--sync-every has no meaning with --averaging final")
    for name, only in _OF_MODES.items():
        given = options[name] is not None and options[name] is not False
        if given and mode != only:
            known = strategy_name(mode, options["shard"])
            raise UsageError(f"--{name.replace('_', '-')} is for --strategy {strategy_name(only)}, not {known}")
        if not given:
            options[name] = 1 if name == "servers" and mode == "ps" else DEFAULTS[name]
    options["slow"] = options["slow"] or ()
    if mode == "sync":
        return
    if options["batch_norm"] == "synchronized" or (options["batch_norm"] == "local" and mode != "local"):
        raise UsageError(f"--batch-norm {options['batch_norm']} is not for --strategy {strategy_name(mode)}")
    _check_alone(options, mode)
    if mode == "ps":
        _check_served(options)
    if mode in ("ps", "p2p") and options["nesterov"]:
        raise UsageError(f"--nesterov is not for --strategy {strategy_name(mode)}")
    if options["compression"] is not None:
        _check_compression_alone(options["compression"], mode)


def _check_compression_alone(spec: str, mode: str) -> None:
    if mode == "gossip":
        raise UsageError("--compression is not for --strategy gossip, which has no error feedback for replicas")
    from mpicoll.compression import compressor
    from mpicoll.compression.aggregatable import AggregatableCompressor

    if mode != "local" and isinstance(compressor(spec), AggregatableCompressor):
        raise UsageError(
            f"--compression {spec} needs gradients that all ranks sum together; with --strategy {strategy_name(mode)} "
            "each rank sends its own"
        )


def _check_alone(options: dict[str, Any], mode: str) -> None:
    """Refuse what needs ranks that take each step together."""
    algorithm, apart = options["algorithm"], mode in ASYNCHRONOUS
    together = {
        "--shard": options["shard"] != "none",
        "--tensor": options["tensor"] > 1,
        "--pipeline": options["pipeline"] > 1,
        f"--algorithm {algorithm}": algorithm == NOOP or (apart and algorithm != DEFAULTS["algorithm"]),
        f"--overlap {options['overlap']}": options["overlap"] != "auto",
        "--bucket-bytes": options["bucket_bytes"] is not None and apart,
        "--balance auto": options["balance"] == "auto",
        "--warmup-dense": options["warmup_dense"] > 0 and mode != "local",
    }
    for name, given in together.items():
        if given:
            raise UsageError(f"{name} is for ranks that take steps together, not --strategy {strategy_name(mode)}")


def _check_served(options: dict[str, Any]) -> None:
    if options["replicas"] > options["servers"]:
        count, servers = options["replicas"], options["servers"]
        raise UsageError(f"--replicas {count} needs as many servers, and --servers is {servers}")
    if options["backup"] and options["staleness"] != 0:
        raise UsageError("--backup needs --staleness 0: only synchronous steps leave out late gradients")
    if options["damping"] and options["staleness"] == 0:
        raise UsageError("--damping has no meaning with --staleness 0: synchronous steps have no stale gradients")
    _check_pull_compression(options)
    if options["push"] == "direct":
        for name, given in {
            "--compression": options["compression"] is not None,
            "--pull-compression": options["pull_compression"] is not None,
            "--staleness 0": options["staleness"] == 0,
            "--damping": options["damping"],
            f"--optimizer {options['optimizer']}": options["optimizer"] not in ("sgd", "momentum"),
        }.items():
            if given:
                raise UsageError(f"{name} needs --push mailbox, not direct")
