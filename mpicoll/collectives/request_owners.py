"""Persistent requests that are freed with the object that uses them.

A request takes one of the communicator's operation lanes, or a slot of its tags, until it is freed. A program that
makes one trainer or synchronizer after the other does not see them.
"""

from __future__ import annotations

import weakref
from typing import Any

from mpi4py import MPI

from mpicoll.collectives.requests import PersistentRequest


def free_with(owner: Any, requests: list[Any]) -> None:
    """Free persistent requests of mpicoll when `owner` is collected; `requests` may be appended to until then.

    Those that are in flight then stay as they are: other ranks may still use their buffers.
    """
    weakref.finalize(owner, _free, requests).atexit = False


def _free(requests: list[Any]) -> None:
    if MPI.Is_finalized() or not (MPI.Query_thread() == MPI.THREAD_MULTIPLE or MPI.Is_thread_main()):
        return
    for request in requests:
        if isinstance(request, PersistentRequest) and request and request.has_ended:
            request.Free()
