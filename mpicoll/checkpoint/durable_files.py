"""File-system operations of checkpoints: durable writes, atomic names, the owner's lock, and checked opening."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from mpicoll.errors import CheckpointFailed

_STEP = re.compile(r"step-([0-9]{8,18})")
_TEMPORARY = re.compile(r"\.step-[0-9]{8,18}\.[0-9a-f]{16}")
_LOCK = ".lock"
MAX_STEP = 10**18 - 1
_BLOCK_BYTES = 1 << 20
_NOT_SEEN_YET = {errno.ENOENT, errno.ESTALE}
_NAP_SECONDS = 0.05
_T = TypeVar("_T")


def step_name(step: int) -> str:
    """Return the name of a step's folder."""
    return f"step-{step:08d}"


def temporary_name(step: int) -> str:
    """Return a random name for a folder that is not a checkpoint yet, or no longer."""
    return f".{step_name(step)}.{secrets.token_hex(8)}"


def file_name(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank-{rank:04d}.safetensors"


def steps_in(folder: Path) -> list[int]:
    """Return the steps of all names ``step-...`` in `folder`, in ascending order, without a look at what they name."""
    names = (_STEP.fullmatch(entry.name) for entry in os.scandir(folder))
    steps = [int(found[1]) for found in names if found]
    return sorted(step for step in set(steps) if os.path.lexists(folder / step_name(step)))


# ---- one owner ------------------------------------------------------------------------------------------------------


def take(folder: Path) -> int:
    """Create the folder if it is missing, lock it for this process, and return the lock's descriptor.

    The lock is released when the process ends, in whatever way.

    Raises
    ------
    CheckpointFailed
        If another process holds the lock, or the file system does not support locks.
    OSError
        If the folder cannot be created or written.
    """
    folder.mkdir(exist_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(folder / _LOCK, flags, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = "".join(c for c in os.pread(descriptor, 80, 0).decode("ascii", "replace") if c.isprintable())
        os.close(descriptor)
        raise CheckpointFailed(f"{folder}: another run is writing its checkpoints there ({owner})") from None
    except OSError as error:
        os.close(descriptor)
        raise CheckpointFailed(f"{folder}: cannot be locked: {error.strerror}") from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode("ascii", "replace"), 0)
    return descriptor


def clean(folder: Path) -> None:
    """Remove unfinished checkpoints, and removed ones, of former runs. Only the owner of the folder may call this."""
    for entry in os.scandir(folder):
        if _TEMPORARY.fullmatch(entry.name):
            remove(Path(entry.path))


def remove(path: Path) -> None:
    """Remove a folder and its contents, or a file or link of that name; links are not followed."""
    if stat.S_ISDIR(path.lstat().st_mode):
        shutil.rmtree(path)
    else:
        path.unlink()


def put_aside(folder: Path, step: int) -> Path:
    """Rename a checkpoint to a temporary name, atomically, and return its new path."""
    aside = folder / temporary_name(step)
    os.rename(folder / step_name(step), aside)  # noqa: PTH104 - what the fault tests count
    return aside


# ---- durable writing ------------------------------------------------------------------------------------------------


def sync(path: Path) -> None:
    """Wait until the entries of a folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, blocks: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """Write a new file, wait until it is on the disk, and return its length in bytes and SHA-256.

    The hash is computed from memory, not from the file, so that damage on the way to the disk is detected.

    Raises
    ------
    CheckpointFailed
        If the file, read back, differs from what was written.
    OSError
        If the file cannot be written; its filename is `path`.
    """
    digest, length = hashlib.sha256(), 0
    try:
        with path.open("xb") as stream:
            for block in blocks:
                digest.update(block)
                length += stream.write(block)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    written = length, digest.hexdigest()
    with opened(path) as descriptor:
        if fingerprint(descriptor) != written:
            raise CheckpointFailed(f"{path}: is not what was written: read back, its length or SHA-256 differs")
    return written


# ---- careful reading ------------------------------------------------------------------------------------------------


def patiently(action: Callable[[], _T], patience: float) -> _T:
    """Call `action` and return its result; repeat it for up to `patience` seconds while a file is not visible yet.

    A file that another host has just written may become visible later on this one.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            return action()
        except OSError as error:
            if error.errno not in _NOT_SEEN_YET or time.monotonic() >= deadline:
                raise
        time.sleep(_NAP_SECONDS)


@contextlib.contextmanager
def opened(path: Path, patience: float = 0.0) -> Iterator[int]:
    """Open a regular file of a checkpoint for reading; yields its descriptor.

    Raises
    ------
    CheckpointFailed
        If the file is missing, a link, a device or a pipe, if its folder is a link, or if reading fails.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # the last so that a pipe does not block
    try:
        folder = patiently(path.parent.lstat, patience)
        if not stat.S_ISDIR(folder.st_mode):
            raise CheckpointFailed(f"{path.parent}: is not a folder")
        descriptor = patiently(lambda: os.open(path, flags), patience)
    except OSError as error:
        reason = "is a symbolic link" if error.errno == errno.ELOOP else f"cannot be read: {error.strerror}"
        raise CheckpointFailed(f"{path}: {reason}") from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise CheckpointFailed(f"{path}: is not a plain file")
        yield descriptor
    except OSError as error:
        raise CheckpointFailed(f"{path}: cannot be read: {error.strerror}") from None
    finally:
        os.close(descriptor)


def fingerprint(descriptor: int) -> tuple[int, str]:
    """Return length in bytes and SHA-256, as hexadecimal digits, of an open file."""
    digest, length = hashlib.sha256(), 0
    while block := os.pread(descriptor, _BLOCK_BYTES, length):
        digest.update(block)
        length += len(block)
    return length, digest.hexdigest()
