"""The house rules: nothing imports upward, one room calls the MPI library's collectives, one module pickles."""

from __future__ import annotations

import ast
import collections
import graphlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
FLOORS = {
    "kernels": 1,
    "mpicoll/errors.py": 1,
    "mpicoll/environment.py": 1,
    "mpicoll/quantities.py": 1,
    "mpicoll/help_text.py": 1,
    "mpicoll/unused_options.py": 1,
    "mpicoll/tracing.py": 1,
    "mpicoll/schedules": 1,
    "mpicoll/plans": 1,
    "mpicoll/compression": 2,
    "mpicoll/buffers": 2,
    "mpicoll/communicator": 2,
    "mpicoll/messages": 2,
    "mpicoll/optim": 2,
    "mpicoll/progress": 2,
    "mpicoll/shared_memory": 2,
    "mpicoll/collectives": 3,
    "mpicoll/decentralized": 3,
    "mpicoll/objects": 3,
    "mpicoll/parameter_server": 3,
    "mpicoll/comm.py": 4,
    "mpicoll/interface": 4,
    "mpicoll/jit": 4,
    "mpicoll/measure.py": 4,
    "mpicoll/gradients": 5,
    "mpicoll/command_frame.py": 5,
    "mpicoll/tune.py": 5,
    "mpicoll/doctor.py": 5,
    "mpicoll/explain_command.py": 5,
    "mpicoll/warmup.py": 5,
    "mpicoll/predict": 5,
    "mpicoll/program": 5,
    "mpicoll/__main__.py": 8,  # leads to the commands of all rooms
    "mpicoll/__init__.py": 6,  # names everything, imports nothing until it is asked for
    "mpicoll/checkpoint": 5,
    "mpicoll/torch": 5,
    "mpicoll/jax": 5,
    "mpicoll/consensus.py": 5,
    "mpicoll/data": 5,
    "mpicoll/models": 5,
    "mpicoll/train/config.py": 5,  # options as data; they configure the rooms below the trainer, too
    "mpicoll/parallel": 6,
    "mpicoll/train": 7,
    "mpicoll/search": 8,
    "mpicoll/deploy": 8,
    "bench": 8,
}
NOT_ALLOWED = {
    "kernels": ("mpi4py", "mpicoll"),
    "mpicoll/schedules": ("mpi4py", "numpy", "numba"),
    "mpicoll/plans": ("mpi4py", "numpy", "numba"),
    "mpicoll/compression": ("mpi4py", "numba"),
    "mpicoll/errors.py": ("mpi4py", "numpy", "numba"),
    "mpicoll/environment.py": ("mpi4py", "numpy", "numba"),
    "mpicoll/tracing.py": ("mpi4py", "numba"),
    "mpicoll/__main__.py": ("mpi4py", "numpy", "numba"),
    "mpicoll/command_frame.py": ("mpi4py", "numpy", "numba"),
    "mpicoll/explain_command.py": ("mpi4py", "numpy", "numba"),
}
EXCEPT = {
    "mpicoll/schedules/simulate.py": ("numpy",),
    "mpicoll/schedules/columns.py": ("numpy",),
    "mpicoll/plans/simulated_memory.py": ("numpy",),
    "mpicoll/plans/thread_memory.py": ("numpy",),
    "mpicoll/plans/simulated_executor.py": ("numpy",),
    "mpicoll/plans/verify_plan.py": ("numpy",),
}
"""All ranks at once are arrays."""
COLLECTIVES = {"Allreduce", "Reduce", "Bcast", "Allgather", "Allgatherv", "Reduce_scatter", "Reduce_scatter_block",
               "Alltoall", "Gather", "Scatter", "Scan", "Exscan"}  # fmt: skip
PICKLING = {
    "send",
    "recv",
    "isend",
    "irecv",
    "bcast",
    "gather",
    "scatter",
    "allgather",
    "alltoall",
    "reduce",
    "allreduce",
}
SET_UP = {
    ("mpicoll/communicator/settings.py", "agree_on_session"),
    ("mpicoll/communicator/topology.py", "_lowest"),
    ("mpicoll/communicator/topology.py", "_told"),
    ("mpicoll/shared_memory/cache_sharing.py", "sharing"),
    ("mpicoll/shared_memory/method_times.py", "__init__"),
    ("mpicoll/shared_memory/method_times.py", "_of_earlier_runs"),
    ("mpicoll/shared_memory/method_times.py", "_ratios"),
    ("mpicoll/shared_memory/method_times.py", "_run"),
    ("mpicoll/shared_memory/method_times.py", "measure"),
    ("mpicoll/shared_memory/method_times.py", "ratios"),
    ("mpicoll/shared_memory/common_file.py", "common_memory"),
    ("mpicoll/shared_memory/domain.py", "_agreed"),
    ("mpicoll/shared_memory/peers.py", "_exchanged"),
    ("mpicoll/shared_memory/peers.py", "meet"),
    ("mpicoll/progress/message_drain.py", "_count"),
    ("mpicoll/progress/waiting.py", "_count_cores"),
    ("mpicoll/progress/waiting.py", "polls_before_yield"),
    ("mpicoll/communicator/environment_agreement.py", "agree"),
    ("mpicoll/communicator/timed_agreement.py", "largest_of_all"),
    ("mpicoll/collectives/machine_tables.py", "told"),
}
"""Where the MPI library's collectives carry settings, addresses and counts of ours, not data of the caller's."""

WINDOWS = {
    "bench/server.py": "Allocate",
    "mpicoll/parameter_server/remote_memory.py": "Allocate",
}
FILES = sorted(
    path.relative_to(REPOSITORY) for top in ("kernels", "mpicoll", "bench") for path in (REPOSITORY / top).rglob("*.py")
)


def floor(path: str) -> int:
    """Return the floor of a file, or of the module that a dotted name leads to."""
    return max(((len(room), level) for room, level in FLOORS.items() if path == room or path.startswith(room + "/")))[1]


def text(path: Path) -> str:
    return (REPOSITORY / path).read_text()


@lru_cache(maxsize=1)
def nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(text(path))))


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Yield full names of imported modules, with their line."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from ((name.name, node.lineno) for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module, node.lineno
            yield from ((f"{node.module}.{name.name}", node.lineno) for name in node.names)


def home(name: str) -> str | None:
    """Return the file that a module of ours lives in, or its folder."""
    path = name.replace(".", "/")
    if path == "mpicoll/kernels" or path.startswith("mpicoll/kernels/"):
        return path.removeprefix("mpicoll/")
    for candidate in (path, path.rpartition("/")[0]):
        if (REPOSITORY / f"{candidate}.py").exists():
            return f"{candidate}.py"
        if (REPOSITORY / candidate).is_dir() and candidate not in ("", "mpicoll"):
            return candidate
    return None


def nothing_imports_upward(path: Path) -> Iterator[str]:
    """A module imports from its own floor and those below."""
    for name, line in imports(path) if str(path) != "mpicoll/__init__.py" else ():
        target = home(name) if name.split(".")[0] in ("mpicoll", "bench", "kernels") else None
        if target is not None and floor(target) > floor(str(path)):
            yield f"{line} imports upward: {name}"


def module_of(path: Path) -> str:
    """Return the dotted name under which a file is imported."""
    name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
    return f"mpicoll.{name}" if path.parts[0] == "kernels" else name


def neighbours(path: Path, modules: set[str]) -> set[str]:
    """Return the modules of ours that a file imports, those for annotations included."""
    package = module_of(path) if path.name == "__init__.py" else module_of(path).rpartition(".")[0]
    names = {name for name, _ in imports(path)}
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.level:
            parts = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*parts, *([node.module] if node.module else [])])
            names |= {base, *(f"{base}.{name.name}" for name in node.names)}
    # `from package import module` imports the module; what else a package holds is its own business.
    packages = {name for name in names if any(other.startswith(f"{name}.") for other in names & modules)}
    return (names & modules) - packages - {module_of(path)}


def test_no_modules_import_each_other_in_a_circle() -> None:
    modules = {module_of(path) for path in FILES}
    graph = {module_of(path): neighbours(path, modules) for path in FILES}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, with the circle


def test_no_two_modules_have_one_name() -> None:
    """A name in a traceback, an editor's tab or a search leads to one module."""
    names = collections.Counter(path.name for path in FILES if path.stem not in ("__init__", "__main__", "cli"))
    assert [name for name, count in names.items() if count > 1] == []


def modules_and_functions_are_short(path: Path) -> Iterator[str]:
    """A module has at most 350 lines, a function fewer than 60."""
    count = len(text(path).splitlines())
    if count > 350:
        yield f"1 has {count} lines"
    for node in nodes(path):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and (node.end_lineno or 0) - node.lineno >= 60:
            yield f"{node.lineno} {node.name} is long"


def rooms_know_no_mpi_or_arrays(path: Path) -> Iterator[str]:
    """Some folders are usable without MPI, or without NumPy."""
    for room, names in NOT_ALLOWED.items():
        if str(path) == room or str(path).startswith(room + "/"):
            for name, line in imports(path):
                top = name.split(".")[0]
                if top in names and top not in EXCEPT.get(str(path), ()) and not name.startswith("mpicoll.kernels"):
                    yield f"{line} imports {name}"


def calls(path: Path) -> Iterator[tuple[str, str, ast.Call]]:
    """Yield the enclosing function, the method's name and each call of a method."""
    for function in nodes(path):
        if isinstance(function, ast.FunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    yield function.name, node.func.attr, node


WITH_MPI = ("buffers", "collectives", "communicator", "messages", "progress", "shared_memory")


def one_room_calls_the_mpi_librarys_collectives(path: Path) -> Iterator[str]:
    """Others call them while communicators are made only."""
    if path.parts[0] != "mpicoll" or path.parts[1] not in WITH_MPI or path.name == "native.py":
        return
    for function, method, node in calls(path):
        collective = method in COLLECTIVES or method.removeprefix("I").capitalize() in COLLECTIVES
        if collective and (str(path), function) not in SET_UP:
            yield f"{node.lineno} {function} calls {method}"


def windows_are_allocated_in_few_places(path: Path) -> Iterator[str]:
    """Windows on memory of ours, or dynamic ones, would need the owner inside MPI, and MPI libraries fail with them."""
    for node in nodes(path) if "Win" in text(path) else ():
        is_window = isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("MPI.Win")
        if is_window and WINDOWS.get(str(path)) != node.attr:
            yield f"{node.lineno} MPI.Win.{node.attr}"


PICKLER = "mpicoll/objects/pickling.py"
"""The module that may use mpi4py's pickler, for the collectives of objects."""


CALLERS_OBJECTS = "mpicoll/torch/tensor_communicator.py"
"""It passes the caller's objects on to the collectives of objects, as Horovod's functions do."""


def one_module_pickles(path: Path) -> Iterator[str]:
    """Pickles go through mpi4py's pickler, in the collectives of objects."""
    for name, line in imports(path):
        if name.split(".")[0] in ("pickle", "cloudpickle", "dill", "marshal"):
            yield f"{line} imports {name}"
    for node in nodes(path) if "pickle" in text(path) and str(path) != PICKLER else ():
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("MPI.pickle"):
            yield f"{node.lineno} pickles"
    for _, method, node in calls(path):
        if method not in PICKLING:
            continue
        assert isinstance(node.func, ast.Attribute)
        owner = ast.unparse(node.func.value).lower()
        if ("comm" in owner or "world" in owner) and str(path) != CALLERS_OBJECTS:
            yield f"{node.lineno} {method}"
        if owner.endswith("_objects") and str(path) != "mpicoll/interface/object_collectives.py":
            yield f"{node.lineno} {method}"


def the_library_does_not_print(path: Path) -> Iterator[str]:
    """Commands write to sys.stdout."""
    for node in nodes(path) if path.parts[0] == "mpicoll" and path.name != "run_report.py" else ():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            yield f"{node.lineno} prints"


def docstrings_name_the_thing(path: Path) -> Iterator[str]:
    """As those of NumPy and PyTorch do, instead of asking what it is."""
    for node in nodes(path):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            first = (ast.get_docstring(node) or "?").split()[0]
            line = getattr(node, "lineno", 1)
            if first in ("What", "Whether", "How", "Which", "Where", "Who"):
                yield f"{line} {first} ..."


CHECKS = (
    nothing_imports_upward,
    modules_and_functions_are_short,
    rooms_know_no_mpi_or_arrays,
    one_room_calls_the_mpi_librarys_collectives,
    windows_are_allocated_in_few_places,
    one_module_pickles,
    the_library_does_not_print,
    docstrings_name_the_thing,
)


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    """Violations of each check in all files, which are read one after the other."""
    lines: dict[str, list[str]] = {check.__name__: [] for check in CHECKS}
    for path in FILES:
        for check in CHECKS:
            lines[check.__name__] += [f"{path}:{line}" for line in check(path)]
    return lines


@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_in_all_files(check: str, found: dict[str, list[str]]) -> None:
    assert not found[check], "\n".join(found[check])
