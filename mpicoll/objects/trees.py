"""Reductions of long objects from rank to rank, with the association of mpi4py's.

Each step is one exchange of objects between pairs of ranks, in which all ranks take part. On 4 ranks::

    reduction   1 -> 0, 3 -> 2      then   2 -> 0              along a binomial tree
    scan        0 <-> 1, 2 <-> 3    then   0 <-> 2, 1 <-> 3    by recursive doubling

A rank holds two or three objects at a time, and the ranks run the program's function at the same time: on `size` ranks
log2(size) calls of it follow each other, where one rank that has the objects of all would make size - 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from mpicoll.communicator.channel import Channel
from mpicoll.kernels.object_words import GATHERED_ROOM
from mpicoll.objects.encoding import copied, encode
from mpicoll.objects.folding import AnyCallable
from mpicoll.objects.long_objects import restored, room_for, rounded
from mpicoll.objects.moves import NOTHING, Given, Moves
from mpicoll.objects.records import Description

_OWN, _NONE = object(), object()
"""Stand for this rank's own object, which has not been read yet, and for no object."""
MIN_SIZES = {"allreduce": 5, "reduce": 5, "scan": 9, "exscan": 9}
"""Ranks from which on steps are faster; in a scan each makes two calls of the function, and copies an object."""


def are_faster(name: str, found: Sequence[Description]) -> bool:
    """Return whether the objects of these records are reduced from rank to rank.

    Not those which compiled code gathers: other ranks may have begun that.
    """
    size, longest = len(found), max(map(room_for, found))
    return size >= MIN_SIZES[name] and longest > 0 and size * rounded(longest) > GATHERED_ROOM


def attempted(channel: Channel, function: Callable[..., Any], *arguments: Any) -> tuple[Any, Exception | None]:
    """Return what code of the program returns, or None and what it raises, which the other ranks have to hear.

    A KeyboardInterrupt is told to them at once, and raised.
    """
    try:
        return function(*arguments), None
    except Exception as error:
        return None, error
    except BaseException as error:
        channel.refuse(error)
        raise


class Tree:
    """Steps of one reduction; an exception on a rank is told to all with the next exchange, and raised then.

    Parameters
    ----------
    call
        Word of the collective in the records.
    given, own
        This rank's object, and its record.
    """

    def __init__(self, moves: Moves, function: AnyCallable, call: int, given: Given, own: Description) -> None:
        self._moves, self._function, self._call = moves, function, call
        self._rank, self._size = moves.rank, moves.size
        self._given, self._own, self._channel = given, own, moves.exchange.scope.channel

    def reduce(self, root: int) -> tuple[Any, Exception | None]:
        """Return the reduction of all objects, or why there is none, on the root; it is made on rank 0, as mpi4py does.

        Collective.
        """
        rank, result, error = self._rank, _OWN, None
        for step in self._steps():
            place = rank % (2 * step)
            source = rank + step if place == 0 and rank + step < self._size else None
            arrived, error = self._passed(rank - step if place == step else None, source, result, error)
            if source is not None and error is None:
                result, error = attempted(self._channel, self._combined, result, arrived)
        if root != 0:
            result, error = self._passed(root if rank == 0 else None, 0 if rank == root else None, result, error)
        return result, error

    def scan(self, *, inclusive: bool) -> tuple[Any, Exception | None]:
        """Return the reduction of the objects before this rank's, and its own if `inclusive`, or why there is none.

        Collective.
        """
        block, result, error = _OWN, _OWN if inclusive else _NONE, None
        for step in self._steps():
            other = self._rank ^ step if self._rank ^ step < self._size else None
            arrived, error = self._passed(other, other, block, error)
            if other is not None and error is None:
                is_last = 2 * step >= self._size
                found, error = attempted(self._channel, self._scanned, other, block, result, arrived, is_last)
                block, result = found or (None, None)
        if error is not None or result is _NONE:
            return None, error
        return attempted(self._channel, self._object, result)

    def _steps(self) -> Iterator[int]:
        step = 1
        while step < self._size:
            yield step
            step *= 2

    def _scanned(self, other: int, block: Any, result: Any, arrived: Any, is_last: bool) -> tuple[Any, Any]:
        """Return the reductions of this rank's block and of what is before it, with what another rank's block has.

        The function may change its first operand, which therefore never serves twice.
        """
        if other > self._rank:
            return (block if is_last else self._combined(block, arrived)), result
        if not is_last:
            block = self._function(copied(arrived), self._object(block))
        return block, arrived if result is _NONE else self._function(arrived, self._object(result))

    def _combined(self, before: Any, after: Any) -> Any:
        return self._function(self._object(before), after)

    def _object(self, held: Any) -> Any:
        """Return an object that this rank holds; its own one is a copy, as the others' are."""
        if held is not _OWN:
            return held
        memory = None
        if self._own.data is None:
            memory = np.empty(self._own.nbytes, np.uint8)
            self._given.payload.write(memory.data)
        return restored(self._own, memory)

    def _passed(
        self, target: int | None, source: int | None, held: Any, error: Exception | None
    ) -> tuple[Any, Exception | None]:
        """Pass an object to a rank, receive one, and return it, or why it cannot be read; either rank may be None.

        Collective. Raises `error`, or that the object cannot be sent, on all ranks.
        """
        payloads = [NOTHING.payload] * self._size
        if target is not None and error is None:
            given = self._given if held is _OWN else Given(encode, held)
            payloads[target], error = given.payload, given.error
        found = self._moves.swapped_records(self._call, payloads, error, is_equal=False)
        objects, error = self._moves.exchange.attempted(self._moves.swapped, payloads, found)
        return None if source is None or error is not None else objects[source], error
