"""Persistent requests that are freed with the object that uses them.

A request takes one of the communicator's operation lanes, or a slot of its tags, until it is freed. A program that
makes one trainer or synchronizer after the other does not see them.
"""

from __future__ import annotations

from typing import Any

from mpicoll.collectives.requests import PersistentRequest
from mpicoll.communicator.late_release import release_with


def free_with(owner: Any, requests: list[Any]) -> None:
    """Free persistent requests of mpicoll when `owner` is collected; `requests` may be appended to until then.

    Those that are in flight then stay as they are: other ranks may still use their buffers.
    """
    release_with(owner, _free, requests)


def _free(requests: list[Any]) -> None:
    for request in requests:
        if isinstance(request, PersistentRequest) and request and request.has_ended:
            request.Free()
