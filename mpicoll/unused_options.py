"""Refusal of command-line options that would change nothing beside others."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from mpicoll.errors import MpicollError


def refuse(arguments: argparse.Namespace, what: str, *names: str, defaults: Mapping[str, Any] | None = None) -> None:
    """Raise MpicollError if an option is given that is not for `what`.

    Parameters
    ----------
    names
        Names of options, with underscores; ``name`` is a positional argument.
    defaults
        Values of options that are not given; None or False for those without one.
    """
    for name in names:
        value = getattr(arguments, name)
        if value is None or value is False or value == (defaults or {}).get(name):
            continue
        option = repr(value) if name == "name" else f"--{name.replace('_', '-')}"
        raise MpicollError(f"{option} is not for {what}")
