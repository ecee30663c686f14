"""Attributes of communicator objects: what their methods need of a channel and of settings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mpicoll.collectives import select, tuning_table
from mpicoll.collectives.alltoallw import BlockExchange
from mpicoll.collectives.call_context import CallContext
from mpicoll.collectives.dispatch_choices import fill_dispatch
from mpicoll.collectives.nonblocking_vectors import NonblockingVectorCalls
from mpicoll.collectives.vector_calls import VectorCalls
from mpicoll.communicator.channel import Channel
from mpicoll.interface.derived_communicators import Settings
from mpicoll.objects.exchange import Exchange
from mpicoll.objects.reductions import Reductions


def state_of(channel: Channel, settings: Settings) -> dict[str, Any]:
    """Return the attributes of a communicator object with this channel and these settings.

    Raises
    ------
    TypeError, ValueError
        If a setting is wrong.
    """
    means = select.means_of(channel)._replace(rules=tuning_table.of(channel))
    try:
        select.check_settings(*settings)
    except (TypeError, ValueError) as error:
        channel.refuse(error)  # the others, whose settings may be right, hear of it in their first call
        raise
    settings = Settings(settings.algorithm, float(settings.timeout))
    scope = CallContext(channel, means, *settings)
    auto_table = fill_dispatch(channel, means)
    table = auto_table if settings.algorithm == select.AUTO else 0
    blocks = BlockExchange(scope, table)
    return {
        "_settings": settings,
        "_scope": scope,
        "_size": channel.size,
        "_uncompressed": channel.uncompressed,
        "_auto_table": auto_table,
        "_table": table,
        "_vector_calls": VectorCalls(scope, table),
        "_block_exchange": blocks,
        "_objects": Reductions(Exchange(scope, table, blocks)),
        "_nonblocking_vector_calls": NonblockingVectorCalls(scope, table),
        "_nonblocking_table": table if channel.node is not None else 0,
    }


SET_UP = (
    "_scope", "_size", "_uncompressed", "_auto_table", "_table", "_vector_calls", "_block_exchange", "_objects",
    "_nonblocking_table", "_nonblocking_vector_calls",
)  # fmt: skip
"""Names of these attributes, besides `_settings`."""
TABLES = ("_auto_table", "_table", "_nonblocking_table")
"""Those that are 0 before the communicator is set up, so that calls take the general way, which sets it up."""


class SetUpAttribute:
    """Attribute of a communicator that has not been set up: to ask for it sets the communicator up.

    Afterwards the object's own attribute is found instead. A method ``__getattr__`` would do the same, but then CPython
    takes several times as long to find any attribute. It takes twice as long to find this one, so `TABLES` have none.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, comm: Any, owner: type | None = None) -> Any:
        return self if comm is None else comm._set_up_late(self._name)


def with_subclasses(cls: type) -> Iterator[type]:
    """Yield a class, and all classes that are derived from it."""
    yield cls
    subclasses: list[type] = cls.__subclasses__()
    for other in subclasses:
        yield from with_subclasses(other)
