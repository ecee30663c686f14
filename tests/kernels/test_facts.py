"""Facts that stand in several places: files that a kernel uses, and the collectives."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from mpicoll import plans, schedules
from mpicoll.kernels import jit, job
from mpicoll.schedules.collectives import Over

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


def test_kernels_plans_and_schedules_have_the_same_collectives() -> None:
    """By number in kernels, which import nothing of the others."""
    assert job.COLLECTIVES == plans.COLLECTIVES
    assert set(job.COLLECTIVES) == set(schedules.COLLECTIVES)
    rows = [schedules.COLLECTIVES[name] for name in job.COLLECTIVES]
    assert tuple(number for number, row in enumerate(rows) if row.by_parts) == job.BY_PARTS
    assert tuple(number for number, row in enumerate(rows) if row.rooted) == job.ROOTED
    assert tuple(number for number, row in enumerate(rows) if row.reduces is not Over.NONE) == job.REDUCES
