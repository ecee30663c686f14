"""Messages whose lengths are known only when they are sent: the length stands in the first 8 bytes of their memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from mpi4py import MPI

from mpicoll.errors import CorruptPayload
from mpicoll.kernels import instructions

if TYPE_CHECKING:
    from mpicoll.communicator.channel import Channel

PREFIX_NBYTES = instructions.MESSAGE_HEAD_NBYTES


@dataclass(frozen=True, eq=False)
class PrefixedMemory:
    """Memory of a message, uint8; the first 8 bytes say how many follow, at most all of them."""

    memory: np.ndarray

    @property
    def body(self) -> np.ndarray:
        """Room for what follows the length."""
        return self.memory[PREFIX_NBYTES:]

    @property
    def length(self) -> np.ndarray:
        """The length, int64 of shape (1,)."""
        return self.memory[:PREFIX_NBYTES].view(np.int64)

    def __call__(self) -> np.ndarray:
        """Return the bytes of the message, with its length.

        Raises
        ------
        CorruptPayload
            If the length is not one of 0 to that of :attr:`body`.
        """
        nbytes = int(self.length[0])
        if not 0 <= nbytes <= self.body.size:
            raise CorruptPayload(f"payload of at most {self.body.size} bytes: its head says {nbytes}")
        return self.memory[: PREFIX_NBYTES + nbytes]


class PrefixedSends:
    """The call that starts messages with lengths in their memory.

    Parameters
    ----------
    messages
        Peers, and what is sent to them.
    waits
        Requests of the step; the last ones are those of these messages, and written by the call.
    """

    def __init__(
        self, channel: Channel, messages: Sequence[tuple[int, PrefixedMemory]], tag: int, waits: list[MPI.Request]
    ) -> None:
        self._channel, self.messages, self._tag, self._waits = channel, messages, tag, waits
        self._words = np.zeros((len(messages), instructions.MESSAGE_WORDS), np.int64)

    def __call__(self) -> None:
        """Start the messages, from Python."""
        send_late(self._channel, [(peer, data()) for peer, data in self.messages], self._tag, self._waits)

    def bind(self, handles: np.ndarray) -> dict[str, np.ndarray]:
        """Return the operands of the instruction, whose requests go to `handles`, one for each message."""
        common = {"datatype": _handle(MPI.BYTE), "tag": self._tag, "comm": _handle(self._channel.comm)}
        for words, (peer, data), place in zip(self._words, self.messages, range(len(handles)), strict=True):
            own = {"memory": data.memory.ctypes.data, "peer": peer}
            own["request"] = handles[place:].ctypes.data
            for name, value in (common | own).items():
                words[getattr(instructions, f"MESSAGE_{name.upper()}")] = value
        return {"out": self._words, "left": self._channel.dispatch.sent_nbytes_word}


def _handle(thing: MPI.Datatype | MPI.Comm) -> int:
    """Return the MPI library's handle as a word; an integer is the lower half of it."""
    return int(np.array(MPI._handleof(thing), np.uint64).astype(np.int64))


def send_late(channel: Channel, messages: Sequence[tuple[int, np.ndarray]], tag: int, waits: list[MPI.Request]) -> None:
    """Send messages, given as peers and bytes; their requests become the last ones of `waits`."""
    for place, (peer, data) in enumerate(messages, len(waits) - len(messages)):
        channel.sent_nbytes += data.nbytes
        waits[place] = channel.comm.Isend(data, peer, tag)
