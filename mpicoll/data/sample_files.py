"""Files of samples: IDX, .npz and .npy. Files are not trusted.

The length in a header is compared with the file's size before memory is allocated, object arrays are refused, and
nothing is unpickled. Any fault of a file is raised as a :class:`DataError` that names it.
"""

from __future__ import annotations

import csv
import gzip
import lzma
import math
import stat
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from mpicoll.errors import DataError

IDX_NAMES = {
    "x_train": "train-images-idx3-ubyte",
    "y_train": "train-labels-idx1-ubyte",
    "x_test": "t10k-images-idx3-ubyte",
    "y_test": "t10k-labels-idx1-ubyte",
}
_IDX_DTYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_DEFLATE_LIMIT = 1032
"""No deflate stream expands by more than this factor (zlib, technical details)."""
_MAX_DIMENSIONS = 8
_DAMAGE = (
    OSError, EOFError, ValueError, TypeError, KeyError, IndexError, OverflowError, RuntimeError, NotImplementedError,
    SyntaxError, MemoryError, struct.error, zlib.error, lzma.LZMAError, zipfile.BadZipFile, tokenize.TokenError,
    csv.Error,
)  # fmt: skip


class NpyHeader(NamedTuple):
    """Header of a .npy file; `offset` is the byte at which the data begin."""

    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype
    offset: int

    @property
    def nbytes(self) -> int:
        """Number of bytes of the array."""
        return math.prod(self.shape) * self.dtype.itemsize


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Context that turns the errors of a damaged file into a DataError with the file's name; it is a regular file."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # reading a pipe would not end
            raise DataError(f"{path}: not a regular file")
        yield
    except DataError:
        raise
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except _DAMAGE as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{path}: {reason[:300]}") from None


def _require_size(claimed: int, present: int, what: str) -> None:
    if claimed != present:
        raise DataError(f"{what}: the header promises {claimed} bytes of data, there are {present}")


# ---- IDX ------------------------------------------------------------------------------------------------------------


def read_idx(path: Path) -> np.ndarray:
    """Read an IDX file, gzipped if its name ends in ``.gz``.

    Returns
    -------
    array in native byte order, of the shape that the header gives

    Raises
    ------
    DataError
        If the file is missing, is not IDX, or does not hold exactly what its header promises.
    """
    with naming(path):
        if path.suffix == ".gz":
            limit = path.stat().st_size * _DEFLATE_LIMIT
            with gzip.open(path, "rb") as stream:
                return _read_idx_stream(stream, path, lambda header: limit)
        with path.open("rb") as stream:
            return _read_idx_stream(stream, path, lambda header: path.stat().st_size - header)


def _read_idx_stream(stream: IO[bytes] | gzip.GzipFile, path: Path, room: Callable[[int], int]) -> np.ndarray:
    """Read an array, unless it claims more bytes than `room` says can follow a header of so many bytes."""
    magic = stream.read(4)
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in _IDX_DTYPES or not 1 <= magic[3] <= _MAX_DIMENSIONS:
        raise DataError(f"{path}: does not start like an IDX file, but with {magic!r}")
    extents = stream.read(4 * magic[3])
    shape = struct.unpack(f">{magic[3]}I", extents)
    dtype = np.dtype(_IDX_DTYPES[magic[2]])
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes > room(4 + len(extents)):
        raise DataError(f"{path}: the header promises {nbytes} bytes of data, more than the file can hold")
    data = stream.read(nbytes)
    _require_size(nbytes, len(data) + len(stream.read(1)), str(path))
    return np.frombuffer(data, dtype).reshape(shape).astype(dtype.newbyteorder("="), copy=False)


def read_idx_folder(folder: Path) -> dict[str, np.ndarray]:
    """Read the four files of an MNIST-like data set under their usual names, each gzipped or not.

    Returns
    -------
    dict with x_train, y_train, x_test, y_test

    Raises
    ------
    DataError
        If a file is missing or damaged.
    """
    return {key: read_idx(_find_idx(folder, name)) for key, name in IDX_NAMES.items()}


def _find_idx(folder: Path, name: str) -> Path:
    dotted = name.replace("-idx", ".idx")
    candidates = [folder / f"{stem}{suffix}" for stem in (name, dotted) for suffix in ("", ".gz")]
    for path in candidates:
        if path.is_file():
            return path
    raise DataError(f"{folder}: there is no file {name} or {name}.gz")


# ---- .npy and .npz --------------------------------------------------------------------------------------------------


def _read_npy_header(stream: IO[bytes]) -> NpyHeader:
    """Read the header of a .npy stream and check that it describes plain numbers."""
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream)
    elif version == (2, 0):
        shape, fortran, dtype = np.lib.format.read_array_header_2_0(stream)
    else:
        raise ValueError(f"version {version[0]}.{version[1]} of the .npy format is only for structured arrays")
    if dtype.hasobject or dtype.names is not None or dtype.subdtype is not None or dtype.kind not in "biuf":
        raise ValueError(f"holds {str(dtype)[:60]}, not plain numbers")
    if len(shape) > _MAX_DIMENSIONS or any(extent < 0 for extent in shape):
        raise ValueError(f"has the impossible shape {str(shape)[:60]}")
    return NpyHeader(tuple(int(extent) for extent in shape), fortran, dtype, stream.tell())


def map_npy(path: Path) -> np.ndarray:
    """Map a .npy file into memory, read-only.

    Raises
    ------
    DataError
        If the file is missing, not a .npy file, or of another length than in its header; or if its elements are not
        plain numbers.
    """
    with naming(path), path.open("rb") as stream:
        header = _read_npy_header(stream)
        _require_size(header.nbytes, path.stat().st_size - header.offset, str(path))
        if header.nbytes == 0:
            return np.empty(header.shape, header.dtype)
        order: Any = "F" if header.fortran else "C"
        return np.memmap(path, header.dtype, "r", header.offset, header.shape, order)


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """Read ``x_train, y_train, x_test, y_test``, or ``x, y``, from an .npz file; other members are ignored.

    Raises
    ------
    DataError
        If the file is missing or damaged, holds neither set of names, or anything but plain numbers under them.
    """
    with naming(path), zipfile.ZipFile(path) as archive:
        members = {info.filename: info for info in archive.infolist()}
        for names in (tuple(IDX_NAMES), ("x", "y")):
            if all(f"{name}.npy" in members for name in names):
                return {name: _read_member(archive, members[f"{name}.npy"], path) for name in names}
        raise DataError(f"{path}: needs the arrays {', '.join(IDX_NAMES)}, or x and y")


def _read_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, path: Path) -> np.ndarray:
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{info.filename} is compressed in a way that NumPy does not use")
    if info.file_size > info.compress_size * _DEFLATE_LIMIT or info.compress_size > path.stat().st_size:
        raise ValueError(f"{info.filename} claims {info.file_size} bytes, more than the file can hold")
    with archive.open(info) as stream:
        header = _read_npy_header(stream)
        _require_size(header.nbytes, info.file_size - header.offset, f"{path}: {info.filename}")
        data = stream.read(header.nbytes)
        _require_size(header.nbytes, len(data) + len(stream.read(1)), f"{path}: {info.filename}")
    array = np.frombuffer(data, header.dtype).reshape(header.shape, order="F" if header.fortran else "C")
    return np.ascontiguousarray(array, header.dtype.newbyteorder("="))


def read_csv_rows(path: Path, columns: int) -> np.ndarray:
    """Read a gzipped file of lines of `columns` comma-separated integers from 0 to 255.

    Returns
    -------
    (lines, columns) of uint8

    Raises
    ------
    DataError
        If the file is missing or holds anything else.
    """
    with naming(path), gzip.open(path, "rb") as stream:
        text = stream.read(1 << 24)
        table = np.loadtxt(text.decode("ascii").splitlines(), delimiter=",", dtype=np.uint8, ndmin=2)
        if table.shape[1] != columns:
            raise ValueError(f"has {table.shape[1]} columns instead of {columns}")
        return table
