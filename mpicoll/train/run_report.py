"""Output of a run: messages, progress bar, summary and result files; on rank 0."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from mpicoll.command_frame import OutputFailed
from mpicoll.data.user_paths import expanded
from mpicoll.errors import UsageError
from mpicoll.quantities import counted
from mpicoll.train.config import NOOP, TrainConfig
from mpicoll.train.output_destination import reaches_a_reader
from mpicoll.train.strategies import strategy_name

if TYPE_CHECKING:
    from mpicoll.train.metrics import StepRecord

_CLEARLY_BEHIND = 0.05
"""Part of the median computation of the others by which the slowest rank computes more, to be worth a line."""
_PIPE_INTERVAL = 1.0
"""Seconds between updates of the progress bar where standard error is no terminal, as under most launchers."""


def say(text: str) -> None:
    """Print to standard output.

    Raises
    ------
    OutputFailed
        If nobody reads it, or there is no room for it.
    """
    try:
        print(text, flush=True)
    except OSError as error:
        raise OutputFailed from error


def complain(text: str) -> None:
    """Print to standard error."""
    print(text, file=sys.stderr, flush=True)


def bar_below_table(total: int | None, done: int, unit: str) -> Any:
    """Return tqdm's bar on standard error for a table that grows on standard output, or None.

    There is none without tqdm, or where standard error is no terminal: in a file, and behind a launcher's pipe, the bar
    would stand between the lines of the table.
    """
    if not sys.stderr.isatty() or importlib.util.find_spec("tqdm") is None:
        return None
    from tqdm import tqdm

    tqdm.monitor_interval = 0  # no thread beside MPI
    return tqdm(total=total, initial=done, unit=unit, dynamic_ncols=True, file=sys.stderr)


class Progress:
    """Progress bar by tqdm; does nothing on ranks other than 0, if no bar is wanted, or without tqdm.

    Nor is there one where standard error ends in a file, or goes where standard output goes and that is no terminal,
    also behind a launcher's pipe.
    """

    def __init__(self, config: TrainConfig, total: int, rank: int, done: int = 0) -> None:
        self._bar: Any = None
        if rank or config.quiet or not config.progress or not reaches_a_reader():
            return
        try:
            from tqdm import tqdm
        except ImportError:
            return
        tqdm.monitor_interval = 0  # no thread beside MPI
        interval = 0.1 if sys.stderr.isatty() else _PIPE_INTERVAL
        self._bar = tqdm(
            total=total, initial=done, unit="step", mininterval=interval, dynamic_ncols=True, file=sys.stderr
        )

    def advance(self, steps: int = 1) -> None:
        """Advance the bar by `steps`."""
        if self._bar is not None:
            self._bar.update(steps)

    def show(self, record: StepRecord, loss: str, samples_per_second: float, share: float, lagging: int | None) -> None:
        """Set the figures beside the bar, which appear with its next update."""
        if self._bar is not None:
            accuracy = (
                f", accuracy {record.accuracy:.1%}" if record.accuracy else ""
            )  # a model of the user's own may count no hits
            slow = "" if lagging is None else f", rank {lagging} is slow"
            self._bar.set_description(f"epoch {record.epoch + 1}", refresh=False)
            self._bar.set_postfix_str(
                f"{loss}{accuracy}, {_thousands(samples_per_second)} samples/s, "
                f"communication {share:.0%}{slow}", refresh=False,
            )  # fmt: skip

    def close(self) -> None:
        """Leave the bar's last state on the screen."""
        if self._bar is not None:
            self._bar.close()


def described_loss(loss: float, config: TrainConfig) -> str:
    """Return a loss for messages; that of language modelling in nats per byte, with the perplexity."""
    if config.task != "language_modeling":
        return f"loss {loss:.4f}"
    return f"loss {loss:.4f} nats/byte (perplexity {math.exp(min(loss, 700.0)):.2f})"


def _thousands(value: float) -> str:
    return f"{value:,.0f}"


def summary(result: dict[str, Any]) -> str:
    """Return the final lines: accuracy, throughput, time by phase, and lines on the strategy."""
    if result["steps"] == result["resumed_after"] > 0:
        taken = f"{counted(result['steps'], 'step')}, none of them in this run"
        return f"{_reached(result)} after {taken}{_parameters(result)}"
    time = result["seconds"]
    return (
        f"{_reached(result)} after {counted(result['steps'], 'step')} on {counted(result['ranks'], 'rank')} with "
        f"{counted(result['threads'], 'thread')} each; {_thousands(result['samples_per_second'])} samples/s"
        f"{_parameters(result)}\n"
        f"time by phase: {', '.join(f'{phase} {seconds:.2f} s' for phase, seconds in time.items())} "
        f"({result['communication_share']:.0%} of the steps is communication); "
        f"first step done {result['seconds_to_first_step']:.2f} s after the processes started"
        f"{_stopped(result)}{_hidden(result)}{_slowest(result)}{_shares(result)}{_loss_scale(result)}{_mode(result)}{_compression(result)}"
    )


def _reached(result: dict[str, Any]) -> str:
    if result["config"]["algorithm"] == NOOP:
        return "not a trained model, since gradients were not exchanged (--algorithm noop),"
    accuracy, test_loss, perplexity = result["test_accuracy"], result["test_loss"], result["test_perplexity"]
    counts_hits = accuracy or any(epoch["train_accuracy"] for epoch in result["epochs"])
    if test_loss is None:
        tested = "no test samples"
    elif perplexity is not None:
        tested = f"test loss {test_loss:.4f} nats/byte, perplexity {perplexity:.2f}"
    else:
        tested = f"test accuracy {accuracy:.2%}" if counts_hits else f"test loss {test_loss:.4f}"
    loss = result["train_loss"]
    return tested if loss is None else f"{tested}, train loss {loss:.4f}"


def _parameters(result: dict[str, Any]) -> str:
    digest = result["parameters_sha256"]
    return "" if digest is None else f", parameters {digest[:12]}"


def _stopped(result: dict[str, Any]) -> str:
    """Return a line for a run that was asked to stop, "" for one that has taken all its steps."""
    if not result["stopped"]:
        return ""
    more = "; --resume takes the others" if result["config"]["checkpoint"] else ""
    return f"\nstopped on request after {result['steps']} of {counted(result['total_steps'], 'step')}{more}"


def _hidden(result: dict[str, Any]) -> str:
    """Return a line on the overlap of computation and communication, "" without overlap."""
    overlap = result["overlap"]
    return f"\noverlap: ranks computed for {overlap:.0%} of the time that gradients were under way" if overlap else ""


def _slowest(result: dict[str, Any]) -> str:
    """Return a line on the rank that the others wait for, "" if there is none."""
    slowest = result["slowest_rank"]
    if slowest is None:
        return ""
    rank, share, behind = slowest["rank"], slowest["share"], slowest["behind"]
    if behind < _CLEARLY_BEHIND:
        return ""
    compared = f"it computed {behind:.0%} more than the median of the others"
    return f"\nrank {rank} was the slowest in {share:.0%} of the steps; {compared}"


def _shares(result: dict[str, Any]) -> str:
    """Return a line on the parts of the batches, "" if they are equal."""
    shares = result["shares"]
    if shares is None:
        return ""
    least, most = min(shares), max(shares)
    return f"\nparts of each batch, by pace: {least:.1%} (replica {shares.index(least)}) to {most:.1%}"


def _loss_scale(result: dict[str, Any]) -> str:
    """Return a line on the loss scale of float16, "" without one."""
    scale = result["loss_scale"]
    if scale is None:
        return ""
    skipped = counted(scale["skipped_steps"], "step")
    return f"\nloss scale {scale['factor']:g}; {skipped} skipped, in which gradients overflowed"


def _mode(result: dict[str, Any]) -> str:
    """Return a line on asynchronous training, "" for synchronous training."""
    mode = result["mode"]
    if mode is None:
        return ""
    steps, late = [count for count in mode["steps_by_rank"] if count], mode.get("staleness")
    pace, fewest, most = _thousands(mode["steps_per_second"]), min(steps, default=0), max(steps, default=0)
    taken = counted(most, "step") if fewest == most else f"{fewest} to {counted(most, 'step')}"
    told = [f"workers took {taken}{' each' * (len(steps) > 1 and fewest == most)}, {pace} a second together"]
    if late:
        told.append(f"gradients were {late['mean']:.1f} updates late on average, 99% of them up to {late['p99']}")
    if mode.get("left_out"):
        told.append(f"left out {counted(mode['left_out'], 'gradient')} that arrived after the step")
    if result["config"]["pull_compression"] is not None:
        read = _thousands(mode["read_nbytes_per_step"])
        told.append(f"pulls with {result['config']['pull_compression']} read {read} bytes a step")
    if "skipped" in mode:
        told.append(f"in {mode['skipped']:.0%} of the steps the other rank's mailbox was full")
    return f"\n{strategy_name(result['config']['mode'])}: {'; '.join(told)}"


def _compression(result: dict[str, Any]) -> str:
    """Return a line on bytes sent and compression ratio, "" without compression."""
    config, ratio = result["config"], result["compression_ratio"]
    if config["compression"] is None:
        return ""
    feedback = "with" if result["error_feedback"] else "without"
    sent = "nothing" if ratio is None else f"{_thousands(result['sent_nbytes_per_step'])} bytes a step"
    fewer = "" if ratio is None else f", {ratio:.1f} times fewer than dense"
    return f"\ncompression {config['compression']} {feedback} error feedback: {sent} sent by a rank{fewer}"


# ---- files ----------------------------------------------------------------------------------------------------------


_ENDINGS = {"--json": ".json", "--log-steps": ".csv", "--trace": ".json", "--html": ".html"}
"""Usual endings of the files of options. Others are taken, such as .txt or .log, but not those of other formats."""
_OTHER_FORMATS = (".csv", ".json", ".html", ".npy", ".npz", ".onnx", ".parquet", ".pdf", ".png", ".safetensors", ".svg")


def check_writable(paths: Mapping[str, str | None]) -> None:
    """Refuse paths of result files, by option, that could not be written, before training begins.

    Raises
    ------
    UsageError
        If a folder is missing or not writable, the path is a folder, a device or a pipe, or its ending is that of
        another format than the option writes.
    """
    for option, path in paths.items():
        if path is None:
            continue
        usual, ending = _ENDINGS.get(option), Path(path).suffix.lower()
        if usual is not None and ending != usual and ending in _OTHER_FORMATS:
            raise UsageError(
                f"{option} {path}: the file is written as {usual[1:].upper()}; name it *{usual}, not *{ending}"
            )
        place = expanded(path, UsageError).resolve()
        is_other = place.exists() and not place.is_file()
        if not place.parent.is_dir() or not os.access(place.parent, os.W_OK) or is_other:
            raise UsageError(
                f"{option} {path}: cannot write this file: no such folder, no permission, or not a plain file"
            )


def write_json(path: str, result: dict[str, Any]) -> None:
    """Write `result` as JSON, replacing an old file only when the new one is complete."""
    with Replacing(path) as stream:
        json.dump(result, stream, indent=2, allow_nan=False)
        stream.write("\n")


def write_steps(path: str, rows: Iterable[tuple[int, int, float, float, float | None]]) -> None:
    """Write step, epoch, learning rate, loss and accuracy as comma-separated values that read back exactly.

    An accuracy of None is left empty.
    """
    with Replacing(path) as stream:
        stream.write("step,epoch,learning_rate,loss,accuracy\n")
        stream.writelines(",".join("" if value is None else repr(value) for value in row) + "\n" for row in rows)


class Replacing:
    """Context that writes a new file and moves it to `path` if its block succeeds; mode ``"w"`` or ``"wb"``.

    Symbolic links are followed.
    """

    def __init__(self, path: str, mode: str = "w") -> None:
        self._path, self._mode = expanded(path, UsageError).resolve(), mode

    def __enter__(self) -> IO[Any]:
        handle, self._name = tempfile.mkstemp(dir=self._path.parent, prefix=f".{self._path.name}.")
        self._stream = os.fdopen(handle, self._mode, encoding="utf-8" if self._mode == "w" else None)
        return self._stream

    def __exit__(self, kind: object, *_: object) -> None:
        self._stream.close()
        if kind is None:
            Path(self._name).chmod(0o644)
            Path(self._name).replace(self._path)
        else:
            Path(self._name).unlink()
