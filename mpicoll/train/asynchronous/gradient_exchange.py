"""Interface of asynchronous gradient exchange."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np

State = dict[str, np.ndarray]
"""Parameters and what else is needed to go on: vectors of the model's length, by name; ``"parameters"`` is one."""


class Sent(NamedTuple):
    """Bytes that this rank has sent and read so far, and bytes that it would have sent without compression."""

    sent: int
    read: int
    dense: int


class Exchange(Protocol):
    """One rank's way to the others; it knows the rank's replica of the parameters.

    Collective over all ranks: construction, `finish` and `close`.

    Attributes
    ----------
    scale
        How often the gradient of a worker's share of a batch counts: 1 where all shares come together.
    """

    scale: float

    def before(self) -> None:
        """Bring the replica up to date for the next step; may wait, where the mode says so.

        Raises
        ------
        LeftBehind
            As may `after`.
        """

    def after(self, gradient: np.ndarray, rate: float) -> None:
        """Make use of a step's gradient, which may be overwritten."""

    def beat(self) -> None:
        """Show that this rank is alive, in work that takes long."""

    def snapshot(self) -> None:
        """Let the replica be the newest model that can be had without waiting for a worker; between two steps."""

    def state(self) -> tuple[State, int | None]:
        """Return what a checkpoint has to have, and of how many shares of this run it has the effect, if known."""

    def settle(self) -> None:
        """Wait until the other workers have finished; for one rank, before it finishes itself."""

    def finish(self) -> None:
        """Leave; on workers, the replica becomes the last model, which is the same on all."""

    def close(self) -> None:
        """Free what all ranks have in common."""

    def sent(self) -> Sent:
        """Return what went over the network so far."""

    def nbytes(self) -> dict[str, int]:
        """Return bytes that this rank holds beside replica and gradient, by what they are for."""

    def facts(self) -> dict[str, Any]:
        """Return what is to be reported of the mode, the same on all ranks, after `close`."""
