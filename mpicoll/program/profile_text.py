"""Text report of the profile, and the formats of its numbers."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from mpicoll.quantities import format_nbytes, format_seconds

_SHOWN = 15


def as_text(profile: dict[str, Any]) -> str:
    """Return the profile for a terminal."""
    lines = ["", f"mpicoll profile: {shlex.join(profile['program'])}", *summary(profile), ""]
    if profile["sites"]:
        lines += [*_sites(profile), ""]
    if profile["compared"]:
        lines += [*_comparisons(profile), ""]
    if profile["advice"] is not None:
        lines += [profile["advice"]["sentence"], ""]
    return "\n".join(lines)


def summary(profile: dict[str, Any]) -> list[str]:
    """Return sentences about the whole run."""
    native = profile["mode"] == "native"
    wall, used, calls = profile["wall_seconds"], profile["collective_seconds"], profile["calls"]
    ranks = f"{profile['ranks']} rank{'s' * (profile['ranks'] != 1)}"
    nodes = f"{profile['nodes']} node{'s' * (profile['nodes'] != 1)}"
    lines = [f"{ranks} on {nodes}, collectives by {'the MPI library' if native else 'mpicoll'}"]
    lines.append(f"wall time: {format_seconds(max(wall))}")
    if not native:
        lines[-1] += f", of which {format_seconds(profile['startup_seconds'])} to start mpicoll"
    shares = [each / max(total, 1e-9) for each, total in zip(used, wall, strict=True)]
    waiting = sum(profile["waiting_seconds"]) / len(wall)
    average = format_seconds(sum(used) / len(wall))
    lines.append(
        f"in collectives: {average} a rank ({min(shares):.1%} to {max(shares):.1%} of its time), of which "
        f"{format_seconds(waiting)} waiting for the slowest rank"
    )
    each = profile["overhead_seconds_per_call"]
    lines.append(
        f"calls of a rank: {_range(min(calls), max(calls))}; the profile itself takes about {format_seconds(each)} a "
        f"call, {format_seconds(each * max(calls))} in all"
    )
    if profile["missing"]:
        rank = profile["of_ranks"][0]
        lines.append(f"the program failed and not all ranks came to its end: these are the calls of rank {rank} only")
    return lines


def _range(low: int, high: int) -> str:
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _sites(profile: dict[str, Any]) -> list[str]:
    rows = [["call site", "call", "ranks", "bytes", "by", "calls", "median", "total", "waiting", "slowest"]]
    for site in profile["sites"][:_SHOWN]:
        rows.append(
            [
                place_of(site),
                site["call"],
                str(site["size"]),
                bytes_of(site),
                ", ".join(site["transports"]),
                f"{site['calls']:,}",
                format_seconds(site["median_seconds"]),
                format_seconds(site["seconds"]),
                format_seconds(site["waiting_seconds"]),
                slowest_of(site),
            ]
        )
    left = len(profile["sites"]) - _SHOWN
    title = "By call site (seconds of a rank, on average; calls of the rank that made most):"
    return [title, *_columns(rows), *([f"and {left} more"] if left > 0 else [])]


def place_of(site: dict[str, Any]) -> str:
    """Return file (with its folder), line and function of a call site."""
    return f"{'/'.join(Path(site['file']).parts[-2:])}:{site['line']} {site['function']}"


def bytes_of(entry: dict[str, Any]) -> str:
    """Return the range of message sizes of a call site, "?" if unknown."""
    if entry["nbytes"] is None:
        return "?"
    low, high = entry["nbytes"]
    return short_nbytes(low) if low == high else f"{short_nbytes(low)} to {short_nbytes(high)}"


def short_nbytes(nbytes: int) -> str:
    """Return a number of bytes with its unit, to three significant digits."""
    for unit, factor in (("GB", 1 << 30), ("MB", 1 << 20), ("KB", 1 << 10)):
        if nbytes >= factor:
            return f"{nbytes / factor:.3g} {unit}"
    return format_nbytes(max(nbytes, 0))


def slowest_of(site: dict[str, Any]) -> str:
    """Return the rank that others waited for longest, and the percentage of calls in which it arrived last."""
    if not site["slowest"]:
        return "-"
    first = site["slowest"][0]
    return f"rank {first['rank']}, {first['share_of_calls']:.0%}"


def _comparisons(profile: dict[str, Any]) -> list[str]:
    rows = [["call", "ranks", "bytes", "calls", "program, a call", "mpicoll, a call", "MPI library, a call", "ratio"]]
    for each in profile["compared"]:
        ratio = each["ratio"]
        rows.append(
            [
                each["call"] + (f" {each['op']}" if each["op"] else ""),
                str(each["size"]),
                short_nbytes(each["nbytes"]) if each["nbytes"] >= 0 else "?",
                f"{each['calls']:,}",
                format_seconds(each["transfer_seconds_per_call"]),
                "-" if ratio is None else format_seconds(each["mpicoll_seconds"]),
                "-" if ratio is None else format_seconds(each["library_seconds"]),
                "-" if ratio is None else f"{ratio:.2f}",
            ]
        )
    return ["The same calls made again after the end, in turns, without waiting for slow ranks:", *_columns(rows)]


def _columns(rows: list[list[str]]) -> list[str]:
    """Return rows as aligned lines: words to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    words = ("call site", "call", "by", "slowest")
    cells = [
        [
            cell.ljust(width) if head in words else cell.rjust(width)
            for cell, width, head in zip(row, widths, rows[0], strict=True)
        ]
        for row in rows
    ]
    return ["  ".join(row).rstrip() for row in cells]
