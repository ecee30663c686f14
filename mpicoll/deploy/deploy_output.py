"""Output of the commands on rank 0: a table of models, and a file of results."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mpicoll.data.user_paths import expanded
from mpicoll.deploy.deploy_options import TABLES, DeployOptions
from mpicoll.deploy.evaluation import Evaluation
from mpicoll.errors import UsageError
from mpicoll.quantities import counted, format_seconds, table
from mpicoll.train.run_report import check_writable, say, write_json

_HEAD = ("model", "accuracy", "bytes", "of first", "MAC", "not 0", "latency", "samples/s", "of first")


def check_outputs(options: DeployOptions) -> None:
    """Refuse outputs that could not be written, before training begins.

    Raises
    ------
    UsageError
        If an output cannot be written, or is a file that the command reads.
    """
    outputs = {"--output": options.output, "--json": options.json, "--html": options.chosen.get("html")}
    for option, path in outputs.items():
        if path is not None:
            _check_not_read(option, path, options)
    check_writable(outputs)


def _check_not_read(option: str, path: str, options: DeployOptions) -> None:
    """Refuse an output that is an input, also by another path or link: the original would be lost."""
    for read in _files_read(options):
        is_same = False
        with contextlib.suppress(OSError):  # of a file that is missing, or cannot be looked at
            is_same = expanded(path, UsageError).samefile(expanded(read, UsageError))
        if is_same:
            raise UsageError(f"{option} {path}: is the file that {options.command} reads; name another one")


def _files_read(options: DeployOptions) -> list[str]:
    """Return the models and files of data that the command line names."""
    named = (options.chosen.get("original"), options.chosen.get("teacher"), options.data.get("labels"))
    dataset = options.data.get("dataset", "")
    samples = [dataset] if dataset.endswith((*TABLES, ".npy")) else []
    return [*options.models, *(path for path in named if path is not None), *samples]


def table_of(rows: Sequence[Evaluation]) -> list[str]:
    """Return the lines of a table; sizes and throughput are compared with the first model's."""
    first = rows[0]
    cells = [
        (
            row.name,
            "" if row.accuracy is None else f"{row.accuracy:.2%}",
            f"{row.nbytes:,}",
            f"{row.nbytes / first.nbytes:.1%}",
            f"{row.operations:,}",
            f"{row.nonzero_operations:,}",
            "" if row.latency is None else format_seconds(row.latency),
            "" if row.throughput is None else f"{row.throughput:,.0f}",
            "" if row.throughput is None or first.throughput is None else f"{row.throughput / first.throughput:.2f}x",
        )
        for row in rows
    ]
    return table([_HEAD, *cells])


def publish(options: DeployOptions, rows: Sequence[Evaluation], more: dict[str, Any]) -> None:
    """Print the table, and write the results."""
    if not options.quiet:
        for line in table_of(rows):
            say(line)
        for line in _lines(more):
            say(line)
    if options.json is not None:
        results = [row._asdict() for row in rows]
        write_json(options.json, {"command": options.command, "models": results, **more})


def _lines(more: dict[str, Any]) -> Iterator[str]:
    """Yield lines on the teacher, on the file that was written, and on its comparison with onnxruntime."""
    if (teacher := more.get("sharded_teacher")) is not None:
        yield (
            f"teacher: {teacher['whole_nbytes']:,} bytes of parameters, divided among "
            f"{counted(teacher['ranks'], 'rank')}, which held {teacher['nbytes']:,} bytes each, "
            "with a buffer for a layer"
        )
    if "file" in more:
        yield f"{more['file']}: {more['file_nbytes']:,} bytes"
    found = more.get("onnxruntime")
    if isinstance(found, dict):
        steps = f"; a code of an activation by {found['steps']} step" if found["steps"] else ""
        yield (
            f"onnxruntime: outputs of {found['samples']:,} samples differ by at most {found['difference']:.2g}{steps}; "
            f"the same class for {found['same_classes']:.2%}"
        )
    elif found is not None:
        yield f"onnxruntime: {found}"


def short_name(path: str) -> str:
    """Return the name of a model for tables: the last part of its path."""
    return Path(path).name or path
