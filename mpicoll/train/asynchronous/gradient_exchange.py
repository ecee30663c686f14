"""Interface of asynchronous gradient exchange, which servers, all-to-all exchange and gossip implement."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np

State = dict[str, np.ndarray]
"""State of a run for a checkpoint: vectors by name, among them ``"parameters"``."""


class Sent(NamedTuple):
    """Bytes that this rank has sent and read so far, and bytes that it would have sent without compression."""

    sent: int
    read: int
    dense: int


class Exchange(Protocol):
    """Asynchronous gradient exchange of one rank, bound to its local replica of the parameters.

    The constructor, :meth:`finish` and :meth:`close` are collective over all ranks.

    Attributes
    ----------
    scale
        Factor of the gradient of a worker's share of a batch; 1 if the gradients of all shares are summed, more if some
        of them are left out, or if the update does not depend on their length.
    has_result
        True after :meth:`finish` on ranks whose replica is the final model.
    averages_at_end
        True if :meth:`finish` averages replicas, so that :meth:`state` is final only then, also after :meth:`close`.
    """

    scale: float
    has_result: bool
    averages_at_end: bool

    def before(self) -> None:
        """Update the replica for the next step; may wait, depending on the mode.

        Raises
        ------
        LeftBehind
            If the other ranks have dropped this one; :meth:`after` may raise it, too.
        """

    def after(self, gradient: np.ndarray, rate: float) -> None:
        """Send or apply a step's gradient with learning rate `rate`; the gradient may be overwritten."""

    def beat(self) -> None:
        """Give a sign of life in a long computation."""

    def snapshot(self) -> None:
        """Update the replica to the newest model available without waiting for a worker; between two steps."""

    def state(self) -> tuple[State, int | None]:
        """Return the state for a checkpoint, and the number of shares of this run that it includes, if known."""

    def settle(self) -> None:
        """Wait until the other workers have finished; called on the chief, before it finishes itself."""

    def finish(self) -> None:
        """End this rank's part; on workers, the replica becomes the final model, which is equal on all."""

    def close(self) -> None:
        """Free the memory that the ranks share."""

    def sent(self) -> Sent:
        """Return the bytes sent and read so far."""

    def nbytes(self) -> dict[str, int]:
        """Return the bytes of this rank's memory besides replica and gradient, by purpose."""

    def facts(self) -> dict[str, Any]:
        """Return facts of the mode for the report, equal on all ranks; after :meth:`close`."""
