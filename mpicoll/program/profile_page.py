"""HTML report of the profile: one self-contained file, rendered with Jinja2."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from mpicoll.program.profile_text import bytes_of, place_of, short_nbytes, slowest_of, summary
from mpicoll.quantities import format_seconds

_TEMPLATE = Path(__file__).with_name("profile_page.html")
_BARS = 20


def as_html(profile: dict[str, Any]) -> str:
    """Return the page; text that comes from the program is escaped."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(seconds=format_seconds, place=place_of, nbytes=short_nbytes)
    environment.filters.update(lengths=bytes_of, slowest=slowest_of)
    longest = max([site["seconds"] for site in profile["sites"]], default=0.0) or 1.0
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        profile=profile,
        command=shlex.join(profile["program"]),
        summary=summary(profile),
        longest=longest,
        bars=profile["sites"][:_BARS],
        ranks=_of_ranks(profile),
    )


def _of_ranks(profile: dict[str, Any]) -> list[dict[str, float]]:
    """Return each rank's percentages of its time spent working in collectives, and waiting in them."""
    rows = zip(
        profile["of_ranks"],
        profile["wall_seconds"],
        profile["collective_seconds"],
        profile["waiting_seconds"],
        strict=True,
    )
    return [
        {"rank": rank, "working": 100 * (used - waited) / max(wall, 1e-9), "waiting": 100 * waited / max(wall, 1e-9)}
        for rank, wall, used, waited in rows
    ]
