"""Samples of data sets that users define."""

from __future__ import annotations

import reprlib
import zlib
from typing import Any

import numpy as np

from mpicoll.errors import DataError


def _bytes_of(part: Any) -> bytes:
    try:
        array = np.asarray(part)
    except ValueError:  # rows of different lengths
        return b""
    return b"" if array.dtype.hasobject else array.tobytes()


def check_samples(data: Any, argument: str) -> None:
    """Raise TypeError unless `data` is a user-defined data set or None."""
    if data is not None and not (hasattr(data, "__len__") and hasattr(data, "batch")):
        raise TypeError(f"{argument}: {reprlib.repr(data)} has no len() or no method batch(indices); see ArrayDataset")


class OwnSamples:
    """Samples of a user-defined data set with ``len`` and ``batch(indices)``, none for None.

    See :class:`~mpicoll.data.datasets.Samples`.
    """

    def __init__(self, data: Any) -> None:
        self._data, self.count = data, 0 if data is None else len(data)

    def batch(self, indices: np.ndarray) -> tuple[Any, Any]:
        """See :class:`~mpicoll.data.datasets.Samples`.

        Raises
        ------
        DataError
            If the data set returns other numbers of rows than there are indices.
        """
        x, y = self._data.batch(indices)
        if not len(x) == len(y) == len(indices):
            raise DataError(f"data: batch gives {len(x)} and {len(y)} rows for {len(indices)} indices")
        return x, y

    def digest(self) -> int:
        """Return a checksum of the first and the last sample, without what differs when they are asked for again.

        What a data set changes at random, and what has no bytes to compare, counts as nothing.
        """
        if not self.count:
            return 0
        asked = [self.batch(np.array([0, self.count - 1])) for _ in range(2)]
        once, again = ([_bytes_of(part) for part in parts] for parts in asked)
        return zlib.crc32(b"".join(one for one, other in zip(once, again, strict=True) if one == other))
