"""Abandonment of operations whose messages fail: what is left is cancelled, and the request has ended."""

from __future__ import annotations

import pytest
from mpi4py import MPI

from mpicoll.collectives.requests import Request
from mpicoll.messages.p2p import MessagePlan


class Receive:
    """A posted receive; one of a rank that has died fails whenever it is looked at."""

    def __init__(self, *, fails: bool = False) -> None:
        self._fails = fails
        self.is_cancelled = False

    def Test(self) -> bool:
        if self._fails:
            raise MPI.Exception(MPI.ERR_OTHER)
        return False

    def Cancel(self) -> None:
        self.is_cancelled = True


def test_a_receive_that_has_failed_does_not_keep_others_from_being_cancelled() -> None:
    plan = MessagePlan.__new__(MessagePlan)
    failed, posted = Receive(fails=True), Receive()
    plan._receives = [failed, posted]  # type: ignore[list-item]
    plan.cancel()
    assert posted.is_cancelled


class Flight:
    """An operation that fails, and cannot be abandoned either."""

    def advance(self) -> bool:
        raise ValueError("it failed")

    def fail(self, error: BaseException, *owners: object) -> None:
        raise OSError("it cannot be abandoned")


def test_a_request_whose_operation_cannot_be_abandoned_has_ended() -> None:
    request = Request(1.0)
    request._flight = Flight()  # type: ignore[assignment]
    with pytest.raises(OSError, match="cannot be abandoned"):
        request.step()
    assert request.has_ended
    assert request.step()
    with pytest.raises(ValueError, match="it failed"):
        request.Wait()
