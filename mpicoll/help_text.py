"""Descriptions of commands for ``--help``, from the docstrings of their modules."""

from __future__ import annotations

import re

_ROLE = re.compile(r":[a-z:]+:`~?([^`<]*?)(?:\s*<[^`>]*>)?`")


def without_markup(text: str | None) -> str:
    """Return a docstring as a terminal shows it, without the markup of reStructuredText."""
    return _ROLE.sub(r"\1", text or "").replace("``", "")
