"""Trial on a group of ranks: suggestions and decisions come from rank 0 of the study and are equal on all its ranks."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from mpi4py import MPI

from mpicoll import Intracomm
from mpicoll.consensus import share
from mpicoll.errors import MismatchError, SearchError
from mpicoll.search.coordinator_messages import Coordinator, Record

_REPORT_SECONDS = 1.0
"""Least time between two messages with intermediate values that no pruner waits for."""


class TrialPruned(Exception):
    """Raised by an objective, on all ranks of its group, to end a trial that :meth:`Trial.should_prune` gives up."""


class Group:
    """The ranks that run a trial together.

    Attributes
    ----------
    comm
        Communicator of the group; the study's own messages travel on a duplicate of it.
    coordinator
        The way to rank 0 of the study on the group's first rank, its *leader*; None elsewhere.
    """

    def __init__(self, comm: MPI.Intracomm, coordinator: Coordinator | None, timeout: float) -> None:
        self.comm, self.coordinator = comm, coordinator
        self._plain = comm.Dup()
        # A member waits for its leader while that waits for rank 0.
        self.control = Intracomm(self._plain, timeout=2 * timeout)

    def request(self, record: Record) -> Record:
        """Return the reply to a request; on the leader alone.

        Raises
        ------
        ValueError, TypeError
            If the request was wrong.
        SearchError
            If the study cannot go on.
        """
        assert self.coordinator is not None
        reply = self.coordinator.request(record)
        check(reply)
        return reply

    def agree(self, record: Record) -> Record:
        """Return the reply to a request of the leader on all ranks; collective.

        Raises
        ------
        MismatchError
            If this rank's request differs from the leader's.
        ValueError, TypeError, SearchError
            On all ranks, as in :meth:`request`.
        """
        found = self._asked(record)
        if self.coordinator is None and _plain(found["asked"]) != _plain(record):
            raise MismatchError(
                f"trial: this rank asked for {record}, the first rank of the group for {found['asked']}"
            )
        answer: Record = found["reply"]
        return answer

    def ask(self, record: Record) -> Record:
        """Return the reply to a request of the leader on all ranks, whose own requests do not count; collective.

        Raises
        ------
        ValueError, TypeError, SearchError
            On all ranks, as in :meth:`request`.
        """
        answer: Record = self._asked(record)["reply"]
        return answer

    def _asked(self, record: Record) -> Record:
        """Return the leader's request and the reply; collective."""
        asked: Record | None = None
        if self.coordinator is not None:
            try:
                asked = {"asked": record, "reply": self.coordinator.request(record)}
            except SearchError as error:
                asked = {"asked": record, "reply": {"failed": str(error)}}
        found = share(self.control, asked)
        check(found["reply"])
        return found

    def close(self) -> None:
        """Free the communicators; collective."""
        self._plain.Free()


def _plain(record: Any) -> Any:
    """Return a record as it arrives: with lists in place of tuples."""
    if isinstance(record, dict):
        return {name: _plain(value) for name, value in record.items()}
    return [_plain(each) for each in record] if isinstance(record, (list, tuple)) else record


def check(reply: Record) -> None:
    """Raise if the reply refuses the request, or says that the study cannot go on."""
    if "failed" in reply:
        raise SearchError(reply["failed"])
    if "refused" in reply:
        kind = TypeError if reply["refused"].startswith("TypeError: ") else ValueError
        raise kind(reply["refused"].partition(": ")[2])


class Trial:
    """Trial of a study, on each rank of the group that runs it.

    All ranks of the group call the methods ``suggest_...`` and :meth:`should_prune` alike, and get the same values;
    their parameters mean what they mean in Optuna.

    Attributes
    ----------
    number : int
        Number of the trial in the study, from 0.
    params : dict
        The values suggested so far, by name.
    """

    def __init__(self, group: Group, number: int, *, decides: bool = True) -> None:
        self.number, self.params = number, dict[str, Any]()
        self.attributes: dict[str, Any] = {}
        self._group, self._prune, self._decides = group, False, decides
        self._reports: list[tuple[float, int]] = []
        self._told = time.monotonic()

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        """Return a number from `low` to `high`, both included; collective over the group.

        Parameters
        ----------
        step
            Distance of the values that are possible; None for all.
        log
            Whether values are sampled on a logarithmic scale.

        Raises
        ------
        ValueError
            On all ranks of the group, if the range is empty or contradicts an earlier one of this name.
        """
        return float(self._suggest("float", name, low=float(low), high=float(high), step=step, log=log))

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        """Return a whole number from `low` to `high`, both included; see :meth:`suggest_float`."""
        return int(self._suggest("int", name, low=int(low), high=int(high), step=step, log=log))

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        """Return one of the choices, each None, a bool, a number or a text; collective over the group."""
        return self._suggest("categorical", name, choices=list(choices))

    def _suggest(self, kind: str, name: str, **distribution: Any) -> Any:
        reply = self._group.agree({"do": "suggest", "with": {"kind": kind, "name": name, **distribution}})
        self.params[name] = reply["value"]
        return reply["value"]

    def report(self, value: float, step: int) -> None:
        """Report an intermediate value, for the pruner; that of the group's first rank counts, others are ignored.

        In a study without a pruner nobody waits for an answer, and reports reach the storage within a few seconds.

        Parameters
        ----------
        step
            Number of the report, from 1: pruners compare trials at equal steps.

        Raises
        ------
        ValueError
            On the group's first rank, if `step` is negative.
        """
        if self._group.coordinator is None:
            return
        value, step = float(value), int(step)
        if step < 0:
            raise ValueError(f"step: {step} is negative")
        self._reports.append((value, step))
        if self._decides:
            reply = self._group.request({"do": "reports", "with": {"values": self.unsent_reports()}})
            self._prune = reply["prune"]
        elif time.monotonic() - self._told > _REPORT_SECONDS:
            self._group.coordinator.post({"do": "reports", "with": {"values": self.unsent_reports()}})
        else:
            self.poll()

    def unsent_reports(self) -> list[tuple[float, int]]:
        """Return the intermediate values that rank 0 has not been told, with their steps, and forget them."""
        found, self._reports, self._told = self._reports, [], time.monotonic()
        return found

    def should_prune(self) -> bool:
        """Return whether the pruner gives this trial up after the last report; collective over the group.

        The objective then raises :class:`TrialPruned`, or Optuna's own exception of this name, on all ranks.
        """
        flag = share(self._group.control, {"prune": self._prune} if self._group.coordinator is not None else None)
        return bool(flag["prune"])

    @property
    def gives_up(self) -> bool:
        """True on the group's first rank if the pruner gives this trial up after the last report; local."""
        return self._prune

    def set_user_attr(self, name: str, value: Any) -> None:
        """Note a fact about the trial; that of the group's first rank is kept.

        Raises
        ------
        TypeError
            If JSON cannot represent it.
        """
        json.dumps({name: value})
        self.attributes[name] = value

    def poll(self) -> None:
        """Answer the other groups, on rank 0 of a study whose MPI library serves one thread only; local.

        :meth:`report` does so as well. Only objectives that do neither for long need to call it.
        """
        if self._group.coordinator is not None:
            self._group.coordinator.poll()
