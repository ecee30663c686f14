"""Progress bars, which must reach whoever watches through a launcher's pipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import TypeVar

VARIABLE = "MPICOLL_BENCH_PROGRESS"
"""Set where somebody watches, though standard error is a pipe to the launcher."""
_Item = TypeVar("_Item")


def bar(items: Sequence[_Item], unit: str, rank: int = 0) -> Iterable[_Item]:
    """Return the items behind a progress bar on rank 0, if somebody watches and tqdm is there."""
    if rank or not (sys.stderr.isatty() or os.environ.get(VARIABLE)):
        return items
    try:
        from tqdm import tqdm
    except ImportError:
        return items
    tqdm.monitor_interval = 0  # no thread beside MPI
    shown: Iterable[_Item] = tqdm(items, unit=unit, leave=False, dynamic_ncols=True, file=sys.stderr, mininterval=0.5)
    return shown


def environment() -> dict[str, str]:
    """Return what to add to the variables of programs that are started, so that they know whether somebody watches."""
    return {VARIABLE: "1"} if sys.stderr.isatty() or os.environ.get(VARIABLE) else {}
