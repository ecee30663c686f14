"""Tables of samples: CSV and Parquet files with a sample in each row, and columns of features and of targets.

Files are not trusted: only columns of numbers are read, and a fault is raised as a :class:`DataError` that names the
file.
"""

from __future__ import annotations

import csv
import os
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpicoll.data.sample_files import naming
from mpicoll.errors import DataError
from mpicoll.quantities import counted

TABLES = (".csv", ".parquet")
_ROW_NBYTES = 16
"""Bytes of a number in a table that is read, and once more as it is used."""
_CELL = re.compile(r"row (\d+), column (\d+)")
"""Place of a cell in NumPy's messages: it counts lines of numbers from 0, without empty ones, and columns from 1."""
_RAGGED = re.compile(r"number of columns changed from (\d+) to (\d+) at row (\d+)")
"""Beginning of NumPy's message on a row of another length; here it counts rows from 1."""


class Table(NamedTuple):
    """Features and targets of a file.

    Attributes
    ----------
    columns : list of str
        Names of all columns of features, then of all columns of targets.
    x : (rows, features) array
        uint8 if all columns are, otherwise of the type that is asked for.
    y : (rows,) or (rows, targets) array
        int64 if all numbers are whole and `reals` is false, otherwise float64.
    """

    columns: list[str]
    x: np.ndarray
    y: np.ndarray


def read_table(path: Path, targets: Sequence[str], dtype: str, *, reals: bool) -> Table:
    """Read a CSV or Parquet file.

    Parameters
    ----------
    targets
        Names of the columns of targets; the last column if there are none.
    dtype
        Type of features that are not all uint8.
    reals
        True for targets of float64, also where all are whole numbers.

    Raises
    ------
    DataError
        If the file is missing, damaged, has no such columns, or anything but numbers in a column.
    """
    with naming(path):
        names, columns = _read_csv(path) if path.suffix == ".csv" else _read_parquet(path)
        if len(set(names)) < len(names):
            raise ValueError("two columns have the same name")
        if len(names) < 2:
            raise ValueError(f"has {counted(len(names), 'column')}; features and a target are needed")
        if missing := [name for name in targets if name not in names]:
            raise ValueError(f"has no column {missing[0]!r}; the columns are {', '.join(names)}")
        chosen = [names.index(name) for name in targets] or [len(names) - 1]
        rest = [number for number in range(len(names)) if number not in chosen]
        if not rest:
            raise ValueError("has columns of targets only")
        features, given = [columns[number] for number in rest], [columns[number] for number in chosen]
        x = _joined(features, "uint8" if all(each.dtype == np.uint8 for each in features) else dtype)
        y = _joined(given, "float64" if reals or any(each.dtype.kind == "f" for each in given) else "int64")
        listed = [names[number] for number in (*rest, *chosen)]
        for array, part in ((x, listed), (y, listed[len(rest) :])):
            if not np.isfinite(array).all():
                place = int(np.isfinite(array).all(axis=0).argmin())
                raise ValueError(f"column {part[place]!r} has a number that is not finite in {array.dtype}")
        return Table(listed, x, y[:, 0] if len(chosen) == 1 else y)


def _joined(columns: Sequence[np.ndarray], dtype: str) -> np.ndarray:
    """Return columns side by side."""
    table = np.empty((len(columns[0]), len(columns)), dtype)
    for place, column in enumerate(columns):
        if dtype == "int64" and column.dtype == np.uint64 and int(column.max()) > np.iinfo(np.int64).max:
            raise ValueError(f"target {int(column.max())} is too large")
        with np.errstate(over="ignore"):
            table[:, place] = column
    return table


def _read_csv(path: Path) -> tuple[list[str], list[np.ndarray]]:
    """Return names and columns; without a line of names, these are the columns' numbers from 0."""
    with path.open(newline="", encoding="utf-8-sig") as stream:  # spreadsheets write a byte-order mark
        first = next(csv.reader([stream.readline(1 << 20)]), [])
        stream.seek(0)
        names = [name.strip() for name in first]
        has_names = not all(map(_is_number, names))
        if has_names and any(map(_is_number, names)):
            raise ValueError(f"the first line has numbers and names: {', '.join(names)[:100]}")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # that there are no rows, which is an error below
                table = np.loadtxt(stream, np.float64, delimiter=",", skiprows=int(has_names), ndmin=2, comments=None)
        except ValueError as error:
            raise ValueError(_with_line(str(error), path, has_names)) from None
    if not table.size:
        raise ValueError("has no rows")
    if has_names and len(names) != table.shape[1]:
        raise ValueError(f"has {counted(len(names), 'name')} and {counted(table.shape[1], 'column')}")
    return names if has_names else list(map(str, range(table.shape[1]))), [_narrowed(column) for column in table.T]


def _with_line(message: str, path: Path, has_names: bool) -> str:
    """Return a message of NumPy's with the line of the file, from 1, in place of its row."""
    cell, ragged = _CELL.search(message), _RAGGED.search(message)
    if cell is None and ragged is None:
        return message
    with path.open(encoding="utf-8-sig") as stream:
        lines = [number for number, line in enumerate(stream, 1) if line.strip()][has_names:]
    if ragged is not None:
        return f"line {lines[int(ragged[3]) - 1]} has {counted(int(ragged[2]), 'column')}, those before {ragged[1]}"
    assert cell is not None
    return _CELL.sub(f"line {lines[int(cell[1])]}, column {cell[2]}", message)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _narrowed(column: np.ndarray) -> np.ndarray:
    """Return a column as int64 if all its numbers are whole, as class labels are; else as it is."""
    if (np.abs(column) < 2**53).all() and (column == np.trunc(column)).all():
        return column.astype(np.int64)
    return column


def _check_memory(rows: int, columns: int) -> None:
    """Refuse a table that does not fit into memory: a short compressed file may claim any number of rows."""
    needed, free = _ROW_NBYTES * rows * columns, os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > free:
        raise ValueError(f"says {rows} rows of {columns} columns, about {needed >> 20} MB; {free >> 20} MB are free")


def _read_parquet(path: Path) -> tuple[list[str], list[np.ndarray]]:
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ImportError:
        raise DataError(f"{path}: Parquet files need pyarrow: pip install 'mpicoll[parquet]'") from None
    try:
        with parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
            for field in schema:
                if not (arrow.types.is_integer(field.type) or arrow.types.is_floating(field.type)):
                    raise ValueError(f"column {field.name!r} holds {field.type}, not numbers")
            if not file.metadata.num_rows:
                raise ValueError("has no rows")
            _check_memory(file.metadata.num_rows, len(schema))
            table: Any = file.read(use_threads=False)
    except (arrow.ArrowException, OSError) as error:
        raise ValueError(f"is not a Parquet file that can be read: {error}") from None
    for name, column in zip(schema.names, table.columns, strict=True):
        if column.null_count:
            raise ValueError(f"column {name!r} has {column.null_count} missing values")
    return list(schema.names), [column.to_numpy() for column in table.columns]
