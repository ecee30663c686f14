"""Forked children of a rank, which are no ranks: they can use no communicator.

A child has copies of what is private to the rank, and shares with it the memory that the other ranks read. Its calls
would be taken for the rank's.
"""

from __future__ import annotations

import os

from mpicoll.communicator.channel import live_channels
from mpicoll.errors import CommunicatorBroken
from mpicoll.progress import driver_thread, progress_engine

REASON = "this process was forked from a rank, and is none itself"


_is_child = False


def refuse_if_forked() -> None:
    """Raise CommunicatorBroken in a forked child of a rank."""
    if _is_child:
        raise CommunicatorBroken(REASON)


def _leave_communicators() -> None:
    global _is_child
    _is_child = True
    driver_thread.forget()
    progress_engine.forsake_all(CommunicatorBroken(f"communicator: it cannot be used after a failure: {REASON}"))
    for channel in list(live_channels):
        channel.break_off(REASON)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_communicators)
