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
"""Mode and sharding of each strategy in :class:`~mpicoll.train.config.TrainConfig`; they are also the values of the
older options ``--mode`` and ``--shard``."""
_NAMES = {pair: name for name, pair in STRATEGIES.items()}


def strategy_name(mode: str, shard: str = "none") -> str:
    """Return the name of a strategy, by its mode and sharding."""
    return _NAMES.get((mode, shard), mode)


@dataclass(frozen=True)
class Strategy:
    """Base class of a trainer's strategies that have options of their own."""

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
        Number of servers: the last ranks, which hold the parameters and take no steps.
    replicas
        Number of copies of each server's part, on as many servers; more than 1 needs ``on_failure="shrink"``.
    staleness
        Largest number of steps that a worker may be ahead of the slowest one; None for no limit, 0 for synchronous
        training.
    backup
        With ``staleness=0``, the number of gradients that are left out of each step, the last ones to arrive.
    damping
        True to lower the learning rate of stale gradients, which there are none of with ``staleness=0``.
    push
        ``"mailbox"``: servers apply the gradients; ``"direct"``: workers add to the parameters.
    pull_compression
        Specification of the compressor of the parameters that workers pull; None for none.
    on_silence
        ``"raise"`` or ``"drop"``, for a worker without a sign of life for longer than the timeout.
    """

    name = "parameter_server"
    servers: int = 1
    replicas: int = 1
    staleness: int | None = None
    backup: int = 0
    damping: bool = False
    push: str = "mailbox"
    pull_compression: str | None = None
    on_silence: str = "raise"

    def options(self) -> dict[str, Any]:
        """Return the options, with None for no backup workers."""
        return {**asdict(self), "backup": self.backup or None}


@dataclass(frozen=True)
class LocalSGD(Strategy):
    """Local SGD: each rank takes steps of its own, and replicas are averaged periodically.

    Parameters
    ----------
    sync_every
        Number of steps between two averages; no meaning with ``averaging="final"``.
    averaging
        ``"periodic"``: replicas are replaced with their mean; ``"elastic"``: they move towards a common centre;
        ``"final"``: they are averaged at the end, and for evaluations alone before. See
        :class:`~mpicoll.parallel.local_sgd.LocalSteps` for the papers.
    """

    name = "local"
    sync_every: int = 16
    averaging: str = "periodic"

    def options(self) -> dict[str, Any]:
        """Return the options, without steps between averages if there are none."""
        return {**asdict(self), "sync_every": None if self.averaging == "final" else self.sync_every}
