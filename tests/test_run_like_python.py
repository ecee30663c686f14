"""`python -m mpicoll run` starts a program as Python itself does; on one rank, most of them without MPI."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from bench import launch
from mpicoll.program.run_command import split
from tests.test_layers import REPOSITORY

FACTS = '''"""A docstring."""
import sys, pickle
class Thing:
    pass
assert type(pickle.loads(pickle.dumps(Thing()))) is Thing
assert sys.modules["__main__"].Thing is Thing and vars(sys.modules["__main__"]) is globals()
print(sys.argv, sys.path, __name__, __package__, __doc__, sorted(globals()))
print(globals().get("__file__"), __spec__ and (__spec__.name, __spec__.origin), type(__loader__).__name__)
print(sys.flags, type(__builtins__), "numpy" in sys.modules, "mpi4py.MPI" in sys.modules)
'''
FAILING = """
import atexit, sys
atexit.register(print, "at exit", sys.argv)
def inner():
    raise {what}
try:
    {{}}[1]
except KeyError:
    inner()
"""
SPAWNING = """
import multiprocessing
class Thing:
    def __init__(self, number):
        self.number = number
def double(thing):
    return Thing(2 * thing.number)
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(double, [Thing(4)])[0].number)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("programs")
    (made / "package" / "inner").mkdir(parents=True)
    (made / "package" / "__init__.py").write_text("print('imported', __name__)\n")
    for name in ("facts.py", "package/module.py", "package/__main__.py", "inside/__main__.py"):
        (made / name).parent.mkdir(exist_ok=True)
        (made / name).write_text(FACTS)
    with zipfile.ZipFile(made / "zipped.zip", "w") as archive:
        archive.writestr("__main__.py", FACTS)
    (made / "wrong.py").write_text("x = 1\nif x\n    pass\n")
    (made / "spawning.py").write_text(SPAWNING)
    ends = {
        "key": "KeyError('x')",
        "interrupt": "KeyboardInterrupt",
        "three": "SystemExit(3)",
        "text": "SystemExit('no')",
    }
    for name, what in ends.items():
        (made / f"{name}.py").write_text(FAILING.format(what=what))
    (made / "hook.py").write_text(
        "import sys\nsys.excepthook = lambda *error: print('mine', error[1])\nraise KeyError(1)\n"
    )
    for name, what in (("hook_exits", "sys.exit(5)"), ("hook_says", "sys.exit('bye')"), ("hook_fails", "1 / 0")):
        (made / f"{name}.py").write_text(f"import sys\nsys.excepthook = lambda *error: {what}\nraise KeyError(1)\n")
    return made


def python(folder: Path, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**launch.clean_environment(), "PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, input=stdin, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    "arguments",
    [
        "facts.py a --profile -m",
        "package/module.py",
        "package/../facts.py -- x",
        "-m package.module --native x",
        "-m package",
        "-m package.nothing",
        "-m package.inner",
        "-m nothing",
        "inside a",
        "zipped.zip a",
        "package/inner",
        "nothing.py",
        "wrong.py",
        "key.py x",
        "three.py",
        "text.py",
        "hook.py",
        "hook_exits.py",
        "hook_says.py",
        "hook_fails.py",
        "spawning.py",
        "-c import(sys);print(sys.argv,sys.path[0]) x -m",
        "- x",
    ],
)
def test_a_program_runs_as_with_python_itself(folder: Path, arguments: str) -> None:
    words = [word.replace("import(sys)", "import sys") for word in arguments.split()]
    plain = python(folder, *words, stdin=FACTS)
    ours = python(folder, "-m", "mpicoll", "run", *words, stdin=FACTS)
    assert plain.returncode == ours.returncode, ours.stderr
    assert plain.stdout == ours.stdout
    assert plain.stderr == ours.stderr


def test_an_interrupt_ends_with_the_shells_status(folder: Path) -> None:
    plain = python(folder, "interrupt.py")
    ours = python(folder, "-m", "mpicoll", "run", "interrupt.py")
    assert (plain.returncode, ours.returncode) == (-2, 130)
    assert (plain.stdout, plain.stderr) == (ours.stdout, ours.stderr)


def test_safe_paths_are_kept(folder: Path) -> None:
    if sys.version_info < (3, 11):
        pytest.skip("Python has -P since 3.11")
    words = ["-m", "mpicoll", "run", "facts.py"]
    plain, ours = python(folder, "-P", "facts.py"), python(folder, "-P", *words)
    assert plain.stdout == ours.stdout


LATE = """
import mpi4py, sys
mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI
assert type(MPI.COMM_WORLD) is MPI.Intracomm
MPI.Init()
import mpicoll
print(type(MPI.COMM_WORLD) is mpicoll.Intracomm, MPI.COMM_SELF.allreduce(3), mpi4py.MPI.__spec__.loader)
MPI.Finalize()
"""


def test_mpi_is_initialized_when_and_as_the_program_says(folder: Path) -> None:
    (folder / "late.py").write_text(LATE)
    done = python(folder, "-m", "mpicoll", "run", "late.py")
    assert re.match(r"True 3 <.*ExtensionFileLoader", done.stdout), done.stderr
    assert (done.returncode, done.stderr) == (0, "")


FIRST = {
    "comm": "import mpicoll.comm as first",
    "operations": "import mpicoll; first = mpicoll.op",
    "tuning": "import mpicoll.collectives.select as first",
}
REST = """
from mpi4py import MPI
import mpicoll
print(type(MPI.COMM_WORLD) is mpicoll.Intracomm, MPI.COMM_SELF.allreduce(3))
"""


@pytest.mark.parametrize("name", FIRST)
def test_a_program_may_import_mpicoll_first(folder: Path, name: str) -> None:
    """Before mpi4py, which the module imports: what is installed then needs the module as a whole."""
    (folder / "first.py").write_text(FIRST[name] + REST)
    done = python(folder, "-m", "mpicoll", "run", "first.py")
    assert (done.stdout, done.returncode, done.stderr) == ("True 3\n", 0, "")


def test_a_module_of_mpicoll_that_cannot_be_imported_is_the_programs_error(folder: Path) -> None:
    (folder / "first.py").write_text(
        "try:\n    import mpicoll.nothing\nexcept ImportError as e:\n    print(e)\n" + REST
    )
    done = python(folder, "-m", "mpicoll", "run", "first.py")
    assert (done.stdout, done.stderr) == ("No module named 'mpicoll.nothing'\nTrue 3\n", "")


BROKEN_AT_FIRST = """
import sys, importlib.abc, importlib.util
class Breaking(importlib.abc.Loader):
    def create_module(self, spec): return None
    def exec_module(self, module): raise ValueError("no library")
class Finder:
    def find_spec(self, name, path, target=None):
        if name == "mpi4py.MPI":
            return importlib.util.spec_from_loader(name, Breaking())
sys.meta_path.insert(1, Finder())
try:
    from mpi4py import MPI
except ValueError as error:
    print(error)
sys.meta_path.pop(1)
"""


def test_an_import_of_mpi_that_fails_may_be_repeated(folder: Path) -> None:
    (folder / "again.py").write_text(BROKEN_AT_FIRST + REST)
    done = python(folder, "-m", "mpicoll", "run", "again.py")
    assert (done.stdout, done.stderr) == ("no library\nTrue 3\n", "")


SHARING = """
import numpy as np
from mpi4py import MPI
from mpicoll.shared_memory import segment
big, small, home = np.empty(100_000), np.empty(10), segment.own()
print([home.address <= each.ctypes.data < home.address + home.nbytes for each in (big, small, big + big)])
"""


@pytest.mark.parametrize(
    ("options", "where"), [("--shared-arrays", "[True, False, True]"), ("", "[False, False, False]")]
)
def test_large_arrays_are_shared_if_wanted(folder: Path, options: str, where: str) -> None:
    (folder / "sharing.py").write_text(SHARING)
    done = python(folder, "-m", "mpicoll", "run", *options.split(), "sharing.py")
    assert done.stdout.strip() == where, done.stderr


def test_a_program_without_mpi_has_no_profile(folder: Path) -> None:
    done = python(folder, "-m", "mpicoll", "run", "--profile", "facts.py")
    assert done.returncode == 0
    assert done.stderr == "mpicoll profile: there is none, since the program has not initialised MPI\n"


@pytest.mark.parametrize(
    ("argv", "own", "program"),
    [
        ("p.py --json x", "", "p.py --json x"),
        ("--json x p.py --profile", "--json x", "p.py --profile"),
        ("--json=x -m mod -m y", "--json=x", "-m mod -m y"),
        ("--profile -- --odd.py a", "--profile", "--odd.py a"),
        ("--timeout 3 -c pass", "--timeout 3", "-c pass"),
        ("--library-calls 0 p.py", "--library-calls 0", "p.py"),
        ("--native -", "--native", "-"),
        ("--native", "--native", ""),
    ],
)
def test_options_end_where_the_program_begins(argv: str, own: str, program: str) -> None:
    assert split(argv.split()) == (own.split(), program.split())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("", "no program was given"),
        ("--nonsense p.py", "--nonsense"),
        ("--prof p.py", "--prof"),
        ("--timeout 0 p.py", "--timeout: '0' is not a positive number"),
        ("--profile --compare -1 p.py", "--compare: '-1' is not a number of seconds, 0 or more"),
        ("--profile --compare soon p.py", "--compare: 'soon' is not a number of seconds, 0 or more"),
        ("--library-calls some p.py", "--library-calls: 'some' is not a number of calls"),
        ("--json no/where.json p.py", "no' is not a folder"),
    ],
)
def test_unusable_options_end_with_status_2(folder: Path, words: str, says: str) -> None:
    done = python(folder, "-m", "mpicoll", "run", *words.split())
    assert done.returncode == 2
    assert says in done.stderr


@pytest.mark.parametrize(("options", "calls"), [("", 16), ("--library-calls 2", 2), ("--library-calls 0", 0)])
def test_new_communicators_begin_with_the_librarys_calls(folder: Path, options: str, calls: int) -> None:
    (folder / "begins.py").write_text(
        "from mpi4py import MPI\n"
        "made, calls = MPI.COMM_WORLD.Dup(), 0\n"
        "while '_scope' not in vars(made):\n"
        "    calls += 1\n"
        "    assert made.allgather({calls}) == [{calls}]\n"
        "print(calls)\n"
    )
    done = python(folder, "-m", "mpicoll", "run", *options.split(), "begins.py")
    assert done.stdout == f"{calls + 1}\n", done.stderr


def test_help_says_what_stands_where(folder: Path) -> None:
    assert "run any mpi4py program" in python(folder, "-m", "mpicoll", "--help").stdout
    done = python(folder, "-m", "mpicoll", "run", "--help")
    assert done.returncode == 0
    assert "[OPTION ...] [--] (PROGRAM | -m MODULE" in done.stdout
