"""The programs' own tests, from their source distributions.

pip fetches a source distribution from wherever it is configured to; nothing of it is built here. The folders with tests
are kept in a folder that git ignores, one for each release.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path, PurePosixPath

from tests.mpirun import REPOSITORY
from tests.programs.table import Program

CACHE = REPOSITORY / ".programs"
SECONDS = 300.0


class Unavailable(Exception):
    """The program or its tests cannot be had, for the reason given."""


def require_installed(program: Program) -> None:
    """Raise `Unavailable` unless the pinned release of `program` is installed."""
    try:
        version = importlib.metadata.version(program.name)
    except importlib.metadata.PackageNotFoundError:
        raise Unavailable(
            f"{program.name} is not installed here; make test-programs runs it in an environment that has it"
        ) from None
    if version != program.version:
        raise Unavailable(f"{program.name} {version} is installed, {program.version} is wanted")


def folder_of(program: Program) -> Path:
    """Return the folder to run `program` in, with its tests; download them the first time.

    Raises
    ------
    Unavailable
        If pip cannot download them, or if the source distribution has no such folder.
    """
    kept = CACHE / f"{program.name}-{program.version}"
    if not kept.is_dir():
        CACHE.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as name:
            made = Path(name) / "made"
            made.mkdir()
            if program.folders:
                unpack(_download(program, Path(name)), program.folders, made)
            # Without a file of settings here pytest takes this repository's.
            (made / "pytest.ini").write_text("[pytest]\n")
            try:
                made.rename(kept)
            except OSError:  # another process was quicker
                if not kept.is_dir():
                    raise
    return kept


def _download(program: Program, folder: Path) -> Path:
    """Let pip download the source distribution into `folder`; return its path."""
    # Only the program itself has to come as source: what its metadata need may come as wheels.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-binary", program.name, "--dest", str(folder), program.requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"pip did not download {program.requirement} within {SECONDS:g} s") from None
    found = sorted(folder.glob("*.tar.gz"))
    if done.returncode or not found:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise Unavailable(f"pip cannot download the source distribution of {program.requirement}: {last}")
    return found[0]


def unpack(archive: Path, folders: tuple[str, ...], target: Path) -> None:
    """Copy the files of some folders of a source distribution to `target`; nothing else is unpacked.

    Raises
    ------
    Unavailable
        If one of the folders has no files.
    """
    missing = set(folders)
    with tarfile.open(archive) as opened:
        for member in opened:
            path = PurePosixPath(*PurePosixPath(member.name).parts[1:])
            inside = [folder for folder in folders if path.is_relative_to(folder)]
            if member.isfile() and inside and ".." not in path.parts:
                content = opened.extractfile(member)
                assert content is not None
                to = target / path
                to.parent.mkdir(parents=True, exist_ok=True)
                to.write_bytes(content.read())
                missing.difference_update(inside)
    if missing:
        raise Unavailable(f"{archive.name} has no {', '.join(sorted(missing))}")
