"""Facts that stand in several places: files that a kernel uses, and the collectives."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from mpicoll import plans, schedules
from mpicoll.kernels import operation_words, source_stamps
from mpicoll.schedules.collective_table import Over

KERNELS = Path(source_stamps.__file__).parent
MODULES = sorted(str(path.relative_to(KERNELS).with_suffix("")) for path in KERNELS.rglob("*.py"))
WITHOUT_KERNELS = {
    "__init__",
    "argument_types",
    "codecs/__init__",
    "compile_lock",
    "compile_progress",
    "compiler",
    "decorators",
    "machine_code",
    "object_file",
    "precompile",
    "source_stamps",
    "user_functions",
    "user_identity",
}
"""Nothing of them is compiled. What `decorators` and `machine_code` decide stands in the entries themselves."""
CODE_OF_OTHERS = {"intrinsics", "address_calls", "overloads"}
"""They import functions of kernels to say what their code is."""


def sources(module: str) -> set[str]:
    """Return the modules from which one takes what is compiled into its kernels: helpers and constants."""
    found = set()
    for node in ast.walk(ast.parse((KERNELS / f"{module}.py").read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            folder = (KERNELS / module).parents[node.level - 1].relative_to(KERNELS)
            names = [node.module] if node.module else [name.name for name in node.names]
            found |= {str(folder / name.replace(".", "/")) for name in names}
    return found


@pytest.mark.parametrize("module", [name for name in MODULES if name not in WITHOUT_KERNELS | CODE_OF_OTHERS])
def test_a_change_of_what_a_kernel_uses_makes_it_stale(module: str) -> None:
    files = (
        source_stamps._SHARED_FILES,
        source_stamps._PLAN_FILES,
        source_stamps._EXCHANGE_FILES,
        source_stamps._CODEC_FILES,
        source_stamps._RANDOM_FILES,
    )
    known, plan, exchange, codecs, random = ({name.removesuffix(".py") for name in names} for names in files)
    if module in plan.union(source_stamps._PLAN_USERS):
        known |= plan
    if module in exchange.union(source_stamps._EXCHANGE_USERS):
        known |= exchange
    if module.startswith("codecs/"):
        known |= codecs
    if module in source_stamps._RANDOM_USERS:
        known |= random
    missing = sources(module) - known - WITHOUT_KERNELS - {module}
    assert not missing, f"kernels/{module}.py uses {sorted(missing)}, whose changes would not be noticed"


def test_kernels_plans_and_schedules_have_the_same_collectives() -> None:
    """By number in kernels, which import nothing of the others."""
    assert operation_words.COLLECTIVES == plans.COLLECTIVES
    assert set(operation_words.COLLECTIVES) == set(schedules.COLLECTIVES)
    rows = [schedules.COLLECTIVES[name] for name in operation_words.COLLECTIVES]
    assert tuple(number for number, row in enumerate(rows) if row.by_parts) == operation_words.BY_PARTS
    assert tuple(number for number, row in enumerate(rows) if row.rooted) == operation_words.ROOTED
    assert tuple(number for number, row in enumerate(rows) if row.reduces is not Over.NONE) == operation_words.REDUCES
