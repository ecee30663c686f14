"""Names of the strategies, the same for :class:`mpicoll.train.Trainer` and the command line. No NumPy, no MPI."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar

STRATEGIES = {
    "replicated": ("sync", "none"),
    "sharded_optimizer": ("sync", "optimizer"),
    "sharded_gradients": ("sync", "gradients"),
    "sharded": ("sync", "parameters"),
    "local": ("local", "none"),
    "parameter_server": ("ps", "none"),
    "peer_to_peer": ("p2p", "none"),
    "gossip": ("gossip", "none"),
}
"""Of each the mode and the sharding in :class:`~mpicoll.train.config.TrainConfig`: also values of the older options
``--mode`` and ``--shard``."""
_NAMES = {pair: name for name, pair in STRATEGIES.items()}


def strategy_name(mode: str, shard: str = "none") -> str:
    """Return the name of a strategy, by its mode and sharding."""
    return _NAMES.get((mode, shard), mode)


@dataclass(frozen=True)
class Strategy:
    """Strategy of a trainer with options of its own; base class."""

    name: ClassVar[str]

    def options(self) -> dict[str, Any]:
        """Return the options, by the names that they have on the command line."""
        return asdict(self)


@dataclass(frozen=True)
class ParameterServer(Strategy):
    """Asynchronous training through parameter servers; see :class:`mpicoll.ParameterServer`.

    Parameters
    ----------
    servers
        The last ranks, so many, hold the parameters and take no steps.
    staleness
        Steps that a worker may be ahead of the slowest; None for any number, 0 for synchronous training.
    backup
        With ``staleness=0``: the last so many gradients of a step are left out.
    damping
        Whether a late gradient counts less.
    push
        ``"mailbox"``: servers apply the gradients; ``"direct"``: workers add to the parameters.
    on_silence
        ``"raise"`` or ``"drop"``, for a worker that is silent for longer than the timeout.
    """

    name = "parameter_server"
    servers: int = 1
    staleness: int | None = None
    backup: int = 0
    damping: bool = False
    push: str = "mailbox"
    on_silence: str = "raise"

    def options(self) -> dict[str, Any]:
        """Return the options; no backup workers are none."""
        return {**asdict(self), "backup": self.backup or None}


@dataclass(frozen=True)
class LocalSGD(Strategy):
    """Local SGD: each rank takes steps of its own, and replicas are averaged now and then.

    Parameters
    ----------
    sync_every
        Steps between two averages.
    averaging
        ``"periodic"``: replicas become their mean; ``"elastic"``: they are drawn towards a common centre.
    """

    name = "local"
    sync_every: int = 16
    averaging: str = "periodic"
