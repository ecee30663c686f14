"""mpi4py's own tests, from the source release of the installed version.

pip fetches the release from wherever it is configured to; nothing is built. The tests are kept in a folder that git
ignores, one for each version.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path, PurePosixPath

import mpi4py

REPOSITORY = Path(__file__).resolve().parent.parent.parent
CACHE = REPOSITORY / ".conformance"
SECONDS = 300.0
"""pip prepares metadata of a source release in an environment of its own, which takes a minute on a busy machine."""


class Unavailable(Exception):
    """The source release cannot be had, for the reason given."""


def folder_of_tests() -> Path:
    """Return the folder with the tests of the installed release; download it the first time.

    Raises
    ------
    Unavailable
        If pip cannot download it, or if it holds no tests.
    """
    version = mpi4py.__version__
    kept = CACHE / f"mpi4py-{version}"
    if not kept.is_dir():
        CACHE.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as name:
            made = Path(name) / "tests"
            _unpack(_download(version, Path(name)), made)
            try:
                made.rename(kept)
            except OSError:  # another process was quicker
                if not kept.is_dir():
                    raise
    return kept


def _download(version: str, folder: Path) -> Path:
    """Let pip download the source release into `folder`; return its path."""
    # Only mpi4py itself has to come as source: what its metadata need may come as wheels.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-binary", "mpi4py", "--dest", str(folder), f"mpi4py=={version}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"pip did not download mpi4py {version} within {SECONDS:g} s") from None
    found = sorted(folder.glob("mpi4py-*.tar.gz"))
    if done.returncode or not found:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise Unavailable(f"pip cannot download the source release of mpi4py {version}: {last}")
    return found[0]


def _unpack(release: Path, target: Path) -> None:
    """Copy the files of the release's folder `test` to `target`; only plain names, nothing else is unpacked."""
    target.mkdir()
    with tarfile.open(release) as archive:
        for member in archive:
            path = PurePosixPath(member.name)
            if member.isfile() and len(path.parts) == 3 and path.parts[1] == "test":
                content = archive.extractfile(member)
                assert content is not None
                (target / path.name).write_bytes(content.read())
    if not any(target.glob("test_*.py")):
        raise Unavailable(f"{release.name} holds no tests")
