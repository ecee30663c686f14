"""How benchmarks show what they measured: tables on the terminal or for a document, and what surrounds the numbers."""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
from collections.abc import Sequence
from typing import Any

from mpicoll.environment import cores

NATIVE = "native"
_PLAN, _COPY = "plan", "copy"


_TRAFFIC = {"allreduce": 2.0, "reduce": 1.0, "bcast": 1.0, "reduce_scatter": 1.0, "allgather": 1.0}
_SPLIT = ("allreduce", "reduce_scatter", "allgather")


def format_size(nbytes: int) -> str:
    """Return a length as people write it."""
    for unit, factor in (("MB", 1 << 20), ("KB", 1 << 10)):
        if nbytes >= factor and nbytes % factor == 0:
            return f"{nbytes // factor} {unit}"
    return f"{nbytes} B"


def bus_bandwidth(collective: str, nbytes: int, size: int, seconds: float) -> float:
    """Return GB/s as nccl-tests define it: what a link of each rank would carry in the best algorithm."""
    share = (size - 1) / size if collective in _SPLIT else 1.0
    return _TRAFFIC[collective] * share * nbytes / seconds / 1e9


def _cells(row: dict[str, Any], names: Sequence[str], with_bound: bool) -> list[str]:
    median = row["median"]
    native = median[NATIVE]
    busbw = bus_bandwidth(row["collective"], row["nbytes"], row["size"], median.get("auto", native))
    cells = [format_size(row["nbytes"]), f"{native * 1e6:.1f}"]
    cells += [f"{native / median[name]:.2f}" for name in names]
    if with_bound:
        cells.append(f"{median[_COPY] / median[_PLAN]:.0%}" if _COPY in median else "")
    return [*cells, f"{busbw:.2f}", row["choice"], str(row["wrong"])]


def table(rows: list[dict[str, Any]], markdown: bool) -> list[str]:
    """Return the table: native in microseconds, ours as native's time over our time (above 1: we are faster)."""
    names = [name for name in rows[0]["median"] if name not in (NATIVE, _COPY)]
    with_bound = any(_COPY in row["median"] for row in rows)
    header = ["size", "native us", *(name.replace("_", " ") for name in names)]
    header += ["bound"] * with_bound + ["busbw GB/s", "auto takes", "wrong"]
    ratios = [[row["median"][NATIVE] / row["median"][name] for row in rows] for name in names]
    means = [f"{math.exp(sum(map(math.log, ratio)) / len(ratio)):.2f}" for ratio in ratios]
    blank = [""] * (with_bound + 2)
    cells = [header, *(_cells(row, names, with_bound) for row in rows)]
    cells.append(["geometric mean", "", *means, *blank, str(sum(row["wrong"] for row in rows))])
    cells.append(["least", "", *(f"{min(ratio):.2f}" for ratio in ratios), *blank, ""])
    widths = [max(len(line[i]) for line in cells) for i in range(len(header))]
    if not markdown:
        return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
    lines = ["| " + " | ".join(line) + " |" for line in cells]
    return [lines[0], "|" + "---:|" * len(header), *lines[1:]]


def metadata(size: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what numbers depend on."""
    import mpi4py
    import numba
    import numpy as np
    from mpi4py import MPI

    from bench.harness import library

    levels = {
        MPI.THREAD_SINGLE: "single",
        MPI.THREAD_FUNNELED: "funneled",
        MPI.THREAD_SERIALIZED: "serialized",
        MPI.THREAD_MULTIPLE: "multiple",
    }
    return {
        "library": library(),
        "thread_level": levels[MPI.Query_thread()],
        "ranks": size,
        "cores": cores(),
        "dtype": arguments.dtype,
        "in_place": arguments.in_place,
        "machine": platform.machine(),
        "python": platform.python_version(),
        "mpi4py": mpi4py.__version__,
        "numpy": np.__version__,
        "numba": numba.__version__,
    }


def _warnings(rows: list[dict[str, Any]], facts: dict[str, Any]) -> list[str]:
    lines = []
    if facts["ranks"] > facts["cores"]:
        lines.append(f"note: {facts['ranks']} ranks share {facts['cores']} cores: times contain scheduling")
    noisy = [format_size(row["nbytes"]) for row in rows if max(row["spread"].values()) > 0.25]
    if noisy:
        lines.append(f"note: quartiles are more than 25 % apart at {', '.join(noisy)}: repeat before you believe it")
    return lines


def report(collective: str, rows: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    """Print the table of one collective, with what surrounds it, and keep the numbers if that was asked for."""
    size = rows[0]["size"]
    facts = metadata(size, arguments)
    place = "in place" if arguments.in_place else "two buffers"
    title = (
        f"{collective}, {facts['library']} (threads: {facts['thread_level']}), {size} ranks on "
        f"{facts['cores']} cores, {arguments.dtype} SUM, {place}; ours as native's time / our time"
    )
    lines = ["", title, "", *table(rows, arguments.markdown), ""]
    sys.stdout.write("\n".join(lines + _warnings(rows, facts)) + "\n")
    if arguments.json:
        arguments.json.write_text(json.dumps({"metadata": facts, "rows": rows}, indent=1))
