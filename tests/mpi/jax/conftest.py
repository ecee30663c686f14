"""Tests of `mpicoll.jax`, where JAX is installed: ``make test-jax``."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("jax") else ["test_*.py"]


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Kinds and counts of the collectives that the handler executes on this rank, in their order."""
    from mpicoll.jax import collective_handler

    found: list[tuple[str, int]] = []

    def noting(kind: str, run: Any) -> Any:
        def noted(comm: Any, collective: Any, *arrays: Any) -> None:
            found.append((kind, arrays[0].size if arrays else 0))
            run(comm, collective, *arrays)

        return noted

    for kind, run in list(collective_handler._RUN.items()):
        monkeypatch.setitem(collective_handler._RUN, kind, noting(kind, run))
    return found
