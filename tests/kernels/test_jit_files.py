"""Stale kernels: a kernel is compiled anew when any file changes whose functions or constants it uses."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from mpicoll.kernels import jit

KERNELS = Path(jit.__file__).parent
MODULES = sorted(path.stem for path in KERNELS.glob("*.py"))
WITHOUT_KERNELS = {"__init__", "warmup", "turns"}


def sources(module: str) -> set[str]:
    """Return the modules from which one takes what is compiled into its kernels: helpers and constants."""
    found = set()
    for node in ast.walk(ast.parse((KERNELS / f"{module}.py").read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module:
            found.add(node.module)
    return found


@pytest.mark.parametrize("module", [name for name in MODULES if name not in WITHOUT_KERNELS])
def test_a_change_of_what_a_kernel_uses_makes_it_stale(module: str) -> None:
    known = {name.removesuffix(".py") for name in jit._SHARED_FILES}
    plan = {name.removesuffix(".py") for name in jit._PLAN_FILES}
    if module in plan.union(jit._PLAN_USERS):
        known |= plan
    missing = sources(module) - known - {"turns"}
    assert not missing, f"kernels/{module}.py uses {sorted(missing)}, whose changes would not be noticed"
