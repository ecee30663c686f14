"""Roles of ranks, elements of shards, and checks of the arguments."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll.compression import Compressor, ErrorFeedback
from mpicoll.compression import error_feedback as feedback
from mpicoll.compression.aggregatable import AggregatableCompressor
from mpicoll.errors import MpicollError
from mpicoll.optim.optimizers import OPTIMIZERS, checked_settings

_OPTIMIZERS = tuple(name for name, kind in OPTIMIZERS.items() if name != "adamw" and not kind.layerwise)
"""Servers know neither weight decay nor whole arrays."""
_PUSHES = ("mailbox", "direct")
_SILENCES = ("raise", "drop")
_TRANSPORTS = ("windows", "messages")
_DTYPES = ("float32", "float64")
PUBLISHED = "published"
"""Name of the published parameters in a state with compressed pulls."""


@dataclass(frozen=True)
class Partition:
    """Roles of `size` ranks: workers first, then servers, each with a shard of the `count` parameters.

    The replicas of shard `s` are on the servers of the shards `s` plus each of `offsets`, counted in a circle.
    """

    size: int
    servers: int
    count: int
    offsets: tuple[int, ...] = ()

    @property
    def workers(self) -> int:
        """Number of workers, which are ranks 0 to workers - 1."""
        return self.size - self.servers

    @property
    def server_ranks(self) -> range:
        """The ranks of the servers, in the order of their shards."""
        return range(self.workers, self.size)

    def server_rank(self, shard: int) -> int:
        """Return the rank of a shard's server."""
        return self.workers + shard

    def replica_ranks(self, shard: int) -> list[int]:
        """Return the ranks that hold a shard's replicas, none of them its server."""
        return [self.server_rank((shard + offset) % self.servers) for offset in self.offsets]

    def bounds(self, shard: int) -> tuple[int, int]:
        """Return the index of a shard's first element and of the one after its last."""
        return shard * self.count // self.servers, (shard + 1) * self.count // self.servers

    def role(self, rank: int) -> str:
        """Return ``"a worker"`` or ``"a server"``."""
        return "a worker" if rank < self.workers else "a server"


def replica_offsets(nodes: Sequence[int], replicas: int) -> tuple[int, ...]:
    """Return offsets for :class:`Partition`, so that few shards have two of their `replicas` copies on one node.

    Every server holds as many copies. Among offsets that are equally good the lowest ones are taken.

    Parameters
    ----------
    nodes
        The node of each server.
    replicas
        Number of copies of a shard, the server's own included.
    """
    servers = len(nodes)

    def together(offset: int) -> int:
        return sum(nodes[shard] == nodes[(shard + offset) % servers] for shard in range(servers))

    return tuple(sorted(sorted(range(1, servers), key=together)[: replicas - 1]))


@dataclass(frozen=True)
class Settings:
    """Checked arguments of a :class:`~mpicoll.ParameterServer`; see there."""

    dtype: np.dtype[Any]
    optimizer: str
    lr: float
    hyper: tuple[tuple[str, float], ...]
    staleness: int | None
    backup: int
    damping: bool
    read_own: bool
    compressor: Compressor | None
    error_feedback: bool
    pull_compressor: Compressor | None
    push: str
    slots: int
    timeout: float
    lease: float
    on_silence: str
    transport: str
    replicas: int

    @property
    def direct(self) -> bool:
        """True if workers add to the parameters themselves."""
        return self.push == "direct"

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the vectors in a state, in the order of a message."""
        slots = () if self.direct else OPTIMIZERS[self.optimizer].slots
        return ("parameters", *slots, *(() if self.pull_compressor is None else (PUBLISHED,)))

    def feedback(self, start: int, stop: int) -> ErrorFeedback | None:
        """Return new error feedback for a shard, or None."""
        if self.compressor is None or not self.error_feedback:
            return None
        return ErrorFeedback(self.compressor.part(start, stop))


def checked_initial(initial: Any) -> np.ndarray:
    """Return `initial`; raise TypeError unless it is a vector of float32 or float64 in native byte order."""
    if not isinstance(initial, np.ndarray) or initial.ndim != 1:
        raise TypeError(f"initial: a one-dimensional array is needed, not {_described(initial)}")
    if initial.dtype.name not in _DTYPES or not initial.dtype.isnative:
        raise TypeError(f"initial: its dtype is {initial.dtype}, not {' or '.join(_DTYPES)} in native byte order")
    return initial


def checked_layout(count: int, servers: int, comm: Any) -> Partition:
    """Return the roles of the ranks; raise TypeError or ValueError if `servers` or `count` is wrong."""
    servers = checked_whole("servers", servers, 1)
    if servers >= comm.size:
        raise ValueError(f"servers: {servers} of {comm.size} ranks leave no worker")
    if count < servers:
        raise ValueError(f"initial: {count} elements are too few for {servers} servers")
    return Partition(comm.size, servers, count)


def checked(
    dtype: np.dtype[Any],
    workers: int,
    *,
    optimizer: str,
    lr: float,
    hyper: dict[str, float],
    staleness: int | None,
    backup: int,
    damping: bool,
    read_own: bool,
    compression: str | Compressor | ErrorFeedback | None,
    error_feedback: bool | None,
    pull_compression: str | Compressor | None,
    push: str,
    slots: int,
    timeout: float,
    lease: float | None,
    on_silence: str,
    transport: str,
    replicas: int,
) -> Settings:
    """Return the settings; raise TypeError or ValueError if an argument is wrong; the message names it."""
    _one_of("optimizer", optimizer, _OPTIMIZERS)
    _one_of("push", push, _PUSHES)
    _one_of("on_silence", on_silence, _SILENCES)
    _one_of("transport", transport, _TRANSPORTS)
    seconds = checked_number("timeout", timeout, positive=True)
    made, fed_back = _checked_compression(compression, error_feedback, dtype)
    if push == "direct" and optimizer != "sgd":
        raise ValueError(f"optimizer: {optimizer!r} needs push='mailbox'; push='direct' is for 'sgd' only")
    if push == "direct" and made is not None:
        raise ValueError(f"compression: {made!r} needs push='mailbox'; MPI adds numbers, not payloads")
    pull_compressor = _checked_pull_compression(pull_compression, dtype, push)
    _check_order(staleness, damping, push)
    if checked_whole("backup", backup, 0) and staleness != 0:
        raise ValueError(f"backup: {backup} needs staleness=0; other modes do not wait for all workers in each step")
    if backup >= workers:
        raise ValueError(f"backup: {backup} of {workers} workers leaves none whose gradients count")
    return Settings(
        dtype=dtype,
        optimizer=optimizer,
        lr=checked_number("lr", lr),
        hyper=checked_settings(optimizer, hyper),
        staleness=None if staleness is None else checked_whole("staleness", staleness, 0),
        backup=int(backup),
        damping=bool(damping),
        read_own=bool(read_own),
        compressor=made,
        error_feedback=fed_back,
        pull_compressor=pull_compressor,
        push=push,
        slots=checked_whole("slots", slots, 1),
        timeout=seconds,
        lease=seconds if lease is None else checked_number("lease", lease, positive=True),
        on_silence=on_silence,
        transport=transport,
        replicas=checked_whole("replicas", replicas, 1),
    )


def _check_order(staleness: int | None, damping: bool, push: str) -> None:
    """Raise ValueError for orders of pushes that the settings exclude; direct ones come in none that a server knows."""
    if damping and staleness == 0:
        raise ValueError("damping: True has no meaning with staleness=0, where no gradient is stale")
    if push != "direct":
        return
    if staleness == 0:
        raise ValueError("staleness: 0 needs push='mailbox'; push='direct' adds gradients in no fixed order")
    if damping:
        raise ValueError("damping: True needs push='mailbox', where the server knows the staleness of a gradient")


def check_replicas(replicas: int, servers: int, transport: str, push: str) -> None:
    """Raise ValueError if shards cannot have so many copies."""
    if replicas == 1:
        return
    if replicas > servers:
        raise ValueError(f"replicas: {replicas} copies of a shard need as many servers, and servers is {servers}")
    if transport != "messages":
        raise ValueError(f"replicas: {replicas} needs transport='messages', since windows do not outlive a server")
    if push == "direct":
        raise ValueError(f"replicas: {replicas} needs push='mailbox', where servers know of each update")


def _checked_compression(
    given: str | Compressor | ErrorFeedback | None, error_feedback: bool | None, dtype: np.dtype[Any]
) -> tuple[Compressor | None, bool]:
    if isinstance(given, ErrorFeedback):
        raise TypeError("compression: give the compressor, not an ErrorFeedback; use error_feedback=True")
    made, fed_back = feedback.chosen(given, error_feedback, dtype)
    if isinstance(made, AggregatableCompressor):
        raise ValueError(f"compression: {given!r} is for allreduce only; the server decodes each push by itself")
    return made, fed_back


def _checked_pull_compression(given: str | Compressor | None, dtype: np.dtype[Any], push: str) -> Compressor | None:
    if given is None:
        return None
    try:
        made, _ = feedback.chosen(given, None, dtype)
    except (TypeError, ValueError, MpicollError) as error:
        raise type(error)(f"pull_{error}") from None
    assert made is not None
    if reason := feedback.delta_refusal(made):
        raise ValueError(f"pull_compression: {given!r} {reason}")
    if push == "direct":
        raise ValueError(f"pull_compression: {given!r} needs push='mailbox', where the server publishes its parameters")
    return made


def checked_whole(name: str, value: Any, least: int) -> int:
    """Return `value` as an int; raise TypeError or ValueError unless it is a whole number of at least `least`."""
    try:
        found = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: {value!r} is not a whole number") from None
    if isinstance(value, bool) or not least <= found < 1 << 31:
        raise ValueError(f"{name}: {value!r} is not a whole number of at least {least}")
    return found


def checked_state(state: Any, count: int, settings: Settings) -> dict[str, np.ndarray] | None:
    """Return `state`; raise TypeError or ValueError unless it is one of :meth:`~mpicoll.ParameterServer.state`."""
    if state is None:
        return None
    vectors = [name for name in settings.state_names if name != PUBLISHED]
    if not isinstance(state, dict) or set(state) - {PUBLISHED} != {*vectors, "steps", "version"}:
        raise ValueError(f"state: {', '.join((*vectors, 'steps', 'version'))} are needed, not {_names(state)}")
    for name in (*vectors, *({PUBLISHED} & set(state))):
        checked_vector(f"state: {name}", state[name], count, settings.dtype)
    for name in ("steps", "version"):
        whole = np.asarray(state[name])
        if whole.dtype != np.int64 or whole.ndim != 1 or whole.size < 1 or whole.min() < 0:
            raise ValueError(f"state: {name}: numbers of servers, from 0, are needed, not {_described(whole)}")
    return dict(state)


def _names(state: Any) -> str:
    return ", ".join(map(str, state)) if isinstance(state, dict) else repr(state)[:80]


def checked_number(name: str, value: Any, *, positive: bool = False) -> float:
    """Return `value` as a float; raise TypeError or ValueError unless it is finite, and positive if asked for."""
    try:
        found = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name}: {value!r} is not a number") from None
    if not math.isfinite(found) or (positive and found <= 0):
        raise ValueError(f"{name}: {value!r} is not a {'positive' if positive else 'finite'} number")
    return found


def checked_part(name: str, vector: Any, first: int | None, count: int, dtype: np.dtype[Any]) -> int:
    """Return the index of the first parameter of a vector: 0 if it has all `count` parameters, else `first`.

    Raise TypeError or ValueError if the vector is not a part of the parameters.
    """
    if first is None:
        checked_vector(name, vector, count, dtype)
        return 0
    begin = checked_whole("first", first, 0)
    size = vector.size if isinstance(vector, np.ndarray) else 0
    if size == 0 or begin + size > count:
        raise ValueError(f"first: {size} elements from {begin} on are not among {count} parameters")
    checked_vector(name, vector, size, dtype)
    return begin


def checked_vector(name: str, vector: Any, count: int, dtype: np.dtype[Any], *, writable: bool = False) -> np.ndarray:
    """Return `vector`; raise TypeError or ValueError unless it is a contiguous array of this count and dtype."""
    if not isinstance(vector, np.ndarray) or vector.dtype != dtype or not vector.dtype.isnative:
        raise TypeError(f"{name}: {dtype} of shape ({count},) is needed, not {_described(vector)}")
    if vector.shape != (count,) or not vector.flags.c_contiguous:
        raise ValueError(f"{name}: contiguous {dtype} of shape ({count},) is needed, not {_described(vector)}")
    if writable and not vector.flags.writeable:
        raise ValueError(f"{name}: the array is read-only")
    return vector


def checked_comm(comm: Any) -> MPI.Intracomm:
    """Return `comm` as an ``MPI.Intracomm``; raise TypeError or ValueError unless it is an intracommunicator."""
    if not isinstance(comm, MPI.Intracomm):
        raise TypeError(f"comm: {comm!r} is not an intracommunicator")
    if comm == MPI.COMM_NULL:
        raise ValueError("comm: it is the null communicator")
    return MPI.Intracomm(comm)


def _described(value: Any) -> str:
    if isinstance(value, np.ndarray):
        strided = "" if value.flags.c_contiguous else "strided "
        return f"{strided}{value.dtype} of shape {value.shape}"
    return repr(value)[:80]


def _one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}: {value!r} is not one of {', '.join(allowed)}")
