"""What is built, and what is installed of it in a new environment, run from outside of the checkout."""

from __future__ import annotations

import re
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

import mpicoll
from mpicoll.train.config import MODES
from tests.extent import mpi_extra
from tests.mpirun import REPOSITORY
from tests.system.environments import (
    Environment,
    build,
    build_wheel_of,
    copy_sources,
    files,
    install,
    lend_compiled_kernels,
    make,
)

README = (REPOSITORY / "README.md").read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("packaging")


@pytest.fixture(scope="module")
def checkout(folder: Path) -> Path:
    """Return sources in which nothing was built; to be left so."""
    return copy_sources(folder / "checkout")


@pytest.fixture(scope="module")
def built(folder: Path) -> Path:
    """Return a folder with the wheel and the source distribution."""
    build(copy_sources(folder / "source"), folder / "built", "--sdist", "--wheel")
    return folder / "built"


@pytest.fixture(scope="module")
def environment(folder: Path, built: Path) -> Environment:
    """Return an environment in which the wheel is installed with the extra that the README names."""
    made = make(folder / "new")
    assert f'pip install "$(ls dist/*.whl)[{mpi_extra()}]"' in README or f"or .[{mpi_extra()}]" in README
    install(made, built, mpi_extra())
    lend_compiled_kernels(made)
    return made


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def wheel_in(folder: Path) -> dict[str, bytes]:
    (wheel,) = folder.glob("*.whl")
    return contents(wheel)


def to_install(checkout: Path) -> dict[str, bytes]:
    """Return what has to be installed: mpicoll/ as it is, and kernels/ as mpicoll/kernels/."""
    places = {"mpicoll": "mpicoll", "kernels": "mpicoll/kernels"}
    return {
        f"{place}/{path}": (checkout / room / path).read_bytes()
        for room, place in places.items()
        for path in files(checkout / room)
    }


def succeeded(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_holds_the_modules_of_the_tree_and_nothing_else(checkout: Path, built: Path) -> None:
    found = {name: data for name, data in wheel_in(built).items() if ".dist-info/" not in name}
    assert set(found) == set(to_install(checkout))
    assert found == to_install(checkout)


def test_packages_below_the_kernels_are_found_and_others_are_not(checkout: Path, folder: Path) -> None:
    source = copy_sources(folder / "grown")
    for name in ("kernels/added", "kernels/added/deep", "mpicoll/train/more", "notebooks"):
        (source / name).mkdir()
        (source / name / "__init__.py").touch()
    expected = set(to_install(source))
    build(source, folder / "built_grown", "--wheel")
    assert expected - set(to_install(checkout)) == {
        "mpicoll/kernels/added/__init__.py",
        "mpicoll/kernels/added/deep/__init__.py",
        "mpicoll/train/more/__init__.py",
    }
    found = wheel_in(folder / "built_grown")
    assert {name for name in found if ".dist-info/" not in name} == expected


def test_the_source_distribution_holds_the_repository_and_builds_the_same_wheel(
    checkout: Path, built: Path, folder: Path
) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        held = set(tar.getnames())
    name = archive.name.removesuffix(".tar.gz")
    assert {f"{name}/{path}" for path in files(checkout)} <= held
    build_wheel_of(archive, folder / "rebuilt")
    assert wheel_in(folder / "rebuilt") == wheel_in(built)


def test_the_version_is_written_in_one_place(built: Path) -> None:
    (metadata,) = (data.decode() for name, data in wheel_in(built).items() if name.endswith("/METADATA"))
    assert f"\nVersion: {mpicoll.__version__}\n" in metadata
    assert mpicoll.__version__ not in (REPOSITORY / "pyproject.toml").read_text()


IMPORT_ALL = """
import importlib, pkgutil, sys
import mpicoll
missing = set()
for framework in ("torch", "jax"):
    try:
        importlib.import_module(framework)
    except ImportError:
        missing.add(framework)
        try:
            importlib.import_module(f"mpicoll.{framework}")
        except ImportError as error:
            assert f"mpicoll[{framework}]" in str(error), error
        else:
            raise AssertionError(f"mpicoll.{framework}: imported without {framework}")
        print("without", framework)
for module in pkgutil.walk_packages(mpicoll.__path__, "mpicoll.", onerror=lambda name: None):
    if module.name.split(".")[1] not in missing:
        importlib.import_module(module.name)
for name, module in sys.modules.items():
    if name.split(".")[0] == "mpicoll":
        print(module.__file__)
for name in ("kernels", "tests", "bench"):
    assert importlib.util.find_spec(name) is None, name
"""


def test_all_modules_can_be_imported_and_come_from_the_wheel(environment: Environment, checkout: Path) -> None:
    imported = set(succeeded(environment.run(0, "-c", IMPORT_ALL)).splitlines())
    modules = {name for name in to_install(checkout) if name.endswith(".py")}
    for framework in ("torch", "jax"):
        if f"without {framework}" in imported:
            imported.remove(f"without {framework}")
            modules = {name for name in modules if not name.startswith(f"mpicoll/{framework}/")}
    assert imported == {str(environment.packages / name) for name in modules}


def test_a_package_that_is_missing_is_missed(environment: Environment) -> None:
    """No other mpicoll fills the gap."""
    modes = environment.packages / "mpicoll" / "train" / "asynchronous"
    aside = modes.rename(environment.folder / "asynchronous")
    try:
        done = environment.run(0, "-m", "mpicoll.train", "--steps", "1")
    finally:
        aside.rename(modes)
    assert done.returncode != 0
    assert "No module named 'mpicoll.train.asynchronous'" in done.stderr


COMMANDS = {
    "explain": (0, "explain ring --size 3 --verify", "verified for 3 ranks"),
    "algorithms": (0, "algorithms", "halving_doubling"),
    "predict": (0, "predict ring --size 1024 --nbytes 64MB", "textbook"),
    "run": (2, "run -m mpi4py.bench helloworld", "Hello, World! I am process 1 of 2"),
    "doctor": (2, "doctor", f"mpicoll {mpicoll.__version__}"),
    "tune": (2, "tune --collective bcast --max-mb 0 --seconds 0.01", "bcast"),
    "warmup": (0, "warmup --compression sign", "1 compressor ready"),
}


def test_help_lists_the_commands_that_are_tried_here(environment: Environment) -> None:
    text = succeeded(environment.run(0, "-m", "mpicoll", "--help"))
    assert set(re.findall(r"^    (\w+)", text, re.MULTILINE)) == set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run(environment: Environment, command: str) -> None:
    size, arguments, says = COMMANDS[command]
    text = succeeded(environment.run(size, "-m", "mpicoll", *arguments.split()))
    assert says in re.sub(" +", " ", text)


def test_the_script_is_the_module(environment: Environment) -> None:
    script = environment.folder / "bin" / "mpicoll"
    assert succeeded(environment.call(str(script), "--version")) == f"mpicoll {mpicoll.__version__}\n"
    assert succeeded(environment.call(str(script), "algorithms")) == succeeded(
        environment.run(0, "-m", "mpicoll", "algorithms")
    )


def test_the_trainer_has_help(environment: Environment) -> None:
    assert "--mode" in succeeded(environment.run(0, "-m", "mpicoll.train", "--help"))


WAYS = [f"--mode {mode}" for mode in MODES]
WAYS += ["--shard parameters --checkpoint run", "--compression int8", "--tensor 2"]


@pytest.mark.parametrize("way", WAYS)
def test_training_begins_in_every_way(environment: Environment, way: str, tmp_path: Path) -> None:
    done = environment.run(2, "-m", "mpicoll.train", "--steps", "2", *way.split(), work=tmp_path)
    assert "accuracy" in succeeded(done)


def _examples(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


SITE = {
    f"{page.relative_to(REPOSITORY / 'docs').with_suffix('')} {number}": example
    for page in sorted((REPOSITORY / "docs").rglob("*.md"))
    for number, example in enumerate(_examples(page.read_text()))
    if page.parent.name != "extend" and ("import mpicoll" in example or "from mpicoll" in example)
    # tests/system/test_examples.py runs these where PyTorch and JAX are installed.
    if "import mpicoll.torch" not in example and "import mpicoll.jax" not in example
}
"""Examples of the site that are programs; other blocks, and those that extend mpicoll, show a few lines of one."""


def test_examples_of_the_readme_run_one_after_the_other(environment: Environment, tmp_path: Path) -> None:
    (tmp_path / "examples.py").write_text("\n".join(_examples(README)))
    succeeded(environment.run(3, "examples.py", work=tmp_path))


@pytest.mark.parametrize("name", SITE)
def test_examples_of_the_site_run(environment: Environment, name: str, tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(SITE[name])
    succeeded(environment.run(3, "example.py", work=tmp_path))


NOT_INSTALLED = "mpicoll: this is a source checkout that is not installed"


@pytest.mark.parametrize("flags", [(), ("-S",)], ids=["installed elsewhere", "nothing installed"])
@pytest.mark.parametrize("program", ["-m mpicoll", "-m mpicoll explain ring", "-m mpicoll.train", "-m mpicoll.warmup"])
def test_a_checkout_that_is_not_installed_says_so_in_one_line(
    environment: Environment, checkout: Path, flags: tuple[str, ...], program: str
) -> None:
    done = environment.run(0, *flags, *program.split(), work=checkout)
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert NOT_INSTALLED in line
    assert "pip install -e" in line
    assert str(checkout) in line


def test_importing_a_checkout_that_is_not_installed_is_an_import_error(
    environment: Environment, checkout: Path
) -> None:
    program = "try:\n import mpicoll\nexcept ImportError as error:\n print(error.name, error)"
    assert succeeded(environment.run(0, "-c", program, work=checkout)).startswith(f"mpicoll {NOT_INSTALLED}")
    done = environment.run(0, "-c", "import mpicoll", work=checkout)
    assert done.stderr.splitlines()[-1].startswith(f"ImportError: {NOT_INSTALLED}")
