"""Copies of this repository, what is built of them, and environments in which that is installed."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from bench import launch
from tests.mpirun import REPOSITORY

DEADLINE = 240
_MADE = (".*", "__pycache__", "*.egg-info", "build", "dist", "results", "*.code", "*.nb[ic]", "*.lock")
"""What is in a checkout, but no source."""


def files(folder: Path) -> set[Path]:
    """Return all files of a folder and the folders in it, relative to it."""
    return {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}


def copy_sources(folder: Path) -> Path:
    """Copy the repository, without what was made in it, so that no build leaves or finds anything there."""
    return Path(shutil.copytree(REPOSITORY, folder, ignore=shutil.ignore_patterns(*_MADE)))


def build(source: Path, to: Path, *kinds: str) -> None:
    """Build ``--sdist`` or ``--wheel`` by what stands in pyproject.toml, with the setuptools that is installed here."""
    _succeed("build", "--no-isolation", *kinds, "--outdir", str(to), str(source))


def build_wheel_of(archive: Path, to: Path) -> None:
    """Let pip build a wheel of a source distribution, as it does where there is no wheel."""
    _succeed("pip", "wheel", "--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", str(to), str(archive))


def _succeed(*module: str) -> None:
    command = [sys.executable, "-m", *module]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@dataclass
class Environment:
    """A virtual environment, and a folder outside of it and of any checkout to run programs in."""

    folder: Path
    work: Path

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")

    @property
    def packages(self) -> Path:
        """Where packages are installed."""
        return self.folder / _packages().relative_to(sys.prefix)

    def run(
        self, size: int, *arguments: str, work: Path | None = None, variables: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run its Python on `size` ranks; without a launcher for 0."""
        command = launch.command(size, arguments, self.python) if size else [self.python, *arguments]
        return self.call(*command, work=work, variables=variables)

    def call(
        self, *command: str, work: Path | None = None, variables: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        kept = {key: value for key, value in launch.clean_environment().items() if not key.startswith("PYTHON")}
        return subprocess.run(
            command,
            cwd=work or self.work,
            env={**kept, "MPICOLL_CACHE_DIR": str(self.work / "cache"), **(variables or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=False,
        )


def make(folder: Path) -> Environment:
    """Make an environment that has all that this one has, but mpicoll, as links: nothing is downloaded."""
    venv.create(folder / "environment", symlinks=True, with_pip=False)
    made = Environment(folder / "environment", folder / "work")
    made.work.mkdir()
    for entry in sorted(set(_entries_of_others())):
        link = made.folder / entry
        if not link.exists():
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(Path(sys.prefix, entry))
    return made


def install(environment: Environment, folder: Path, extra: str) -> None:
    """Let pip install ``mpicoll[extra]`` from a folder of wheels; what the extra asks for has to be there."""
    options = ("--no-index", "--disable-pip-version-check", "--find-links", str(folder))
    done = environment.run(0, "-m", "pip", "install", *options, f"mpicoll[{extra}]")
    assert done.returncode == 0, done.stdout + done.stderr


def lend_compiled_kernels(environment: Environment) -> None:
    """Give installed kernels what was compiled from the same sources here, which takes minutes otherwise.

    Numba knows a source file by its time and length.
    """
    home = environment.packages / "mpicoll" / "kernels"
    for source in (REPOSITORY / "kernels").rglob("*.py"):
        time = source.stat().st_mtime_ns
        os.utime(home / source.relative_to(REPOSITORY / "kernels"), ns=(time, time))
    compiled = [entry for kind in ("*.code", "*.nb[ic]") for entry in (REPOSITORY / "kernels").rglob(kind)]
    assert compiled, "nothing is compiled here: make warmup"
    for entry in compiled:
        to = home / entry.relative_to(REPOSITORY / "kernels")
        to.parent.mkdir(exist_ok=True)
        shutil.copy(entry, to)


def _packages() -> Path:
    return Path(sysconfig.get_path("purelib"))


def _entries_of_others() -> Iterator[Path]:
    """Yield what other distributions have installed, relative to the environment: packages, programs, libraries."""
    packages = _packages()
    depth = len(packages.relative_to(sys.prefix).parts) + 1
    for distribution in importlib.metadata.distributions(path=[str(packages)]):
        for file in (distribution.name != "mpicoll" and distribution.files) or ():
            path = Path(os.path.normpath(packages / file))
            entry = Path(*path.relative_to(sys.prefix).parts[: depth if path.is_relative_to(packages) else 2])
            if entry.name != "__pycache__":
                yield entry
