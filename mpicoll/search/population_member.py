"""Member of a population: the interface that an objective of population-based training implements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from mpicoll import Intracomm
from mpicoll.search.member_transfer import State


class Member(Protocol):
    """Member of a population on each rank of the group that trains it.

    Every method but `train` is called on each rank for itself.
    """

    def train(self, params: Mapping[str, Any], comm: Intracomm) -> float:
        """Train for a generation with hyper-parameters `params`, and return the score; collective over `comm`.

        The score of the group's first rank counts. An exception, or a score that is NaN or infinite, is a failure of
        this member alone.
        """

    def state(self) -> State:
        """Return all arrays that training changes, such as parameters and optimizer state, on this rank."""

    def load(self, state: State) -> None:
        """Continue from the arrays of another member's `state`, which this one may keep."""
