"""Calls of codecs between the messages of a plan: keys of random choices, payloads written and read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mpicoll.compression import Compressor, Key
from mpicoll.kernels import instructions
from mpicoll.kernels.codecs import codec_kernels, counter_random
from mpicoll.messages.calls import Instruction, Memory, present
from mpicoll.messages.prefixed_sends import PREFIX_NBYTES, PrefixedMemory

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpicoll.communicator.channel import Channel

_ALIGNMENT = 64
_CODES = np.dtype(np.uint8)
_VALUES = np.dtype(np.float32)


class NextKeys:
    """The call that numbers an operation and makes the keys of its random choices, one for each of its `shots`.

    Attributes
    ----------
    words : (1 + shots,) uint64
        The number of the operation, and the keys.
    """

    def __init__(self, channel: Channel, shots: int) -> None:
        self._counter, self._rank, self._shots = channel.compression_counter, channel.identity, shots
        self.words = np.zeros(1 + shots, np.uint64)
        self._stream = np.array(counter_random.stream(0, self._rank), np.uint64).view(np.int64).item()

    def key(self, shot: int, first: int) -> Key:
        """Return the key of the present operation for a vector that begins at element `first`."""
        return Key(0, self._rank, self._shots * int(self.words[0]) + shot, first)

    def key_words(self, shot: int) -> np.ndarray:
        """Return the words of that key, uint32 of shape (2,), which change with every operation."""
        return self.words[1 + shot : 2 + shot].view(np.uint32)

    def __call__(self) -> None:
        """Number the operation, from Python."""
        self._counter += 1
        self.words[0] = self._counter[0]
        for shot in range(self._shots):
            self.key_words(shot)[:] = self.key(shot, 0).words()

    def instruction(self) -> Instruction:
        """Return the instruction."""
        places = {"out": self.words, "right": self._counter}
        return Instruction(instructions.NEXT_KEYS, places, {"count": self._shots, "left": self._stream})


class CompressedChunk:
    """Memory for the payload of `count` elements, to be sent or received.

    If the length of the payload depends on the elements, 8 bytes with the length precede it.
    """

    def __init__(
        self, compressor: Compressor, count: int, allocate: Callable[[int, np.dtype[np.uint8]], np.ndarray]
    ) -> None:
        self.compressor, varies = compressor, count > 0 and not compressor.fixed
        nbytes = (varies * PREFIX_NBYTES + compressor.wire_nbytes(count)) if count else 0
        # Each on cache lines of its own.
        self.memory = allocate(-(-nbytes // _ALIGNMENT) * _ALIGNMENT, _CODES)[:nbytes]
        self._prefixed = PrefixedMemory(self.memory) if varies else None
        self.body = self._prefixed.body if self._prefixed else self.memory

    def compress(self, x: np.ndarray, key: Key) -> None:
        """Write the payload of `x`."""
        nbytes = self.compressor.compress(x, self.body, key)
        if self._prefixed:
            self._prefixed.length[0] = nbytes

    def decompress(self, out: np.ndarray, *, add: bool) -> None:
        """Decode the payload to `out`, or add it to `out`.

        Raises
        ------
        CorruptPayload
            If the payload cannot be one of ``out.size`` elements.
        """
        body = self._prefixed()[PREFIX_NBYTES:] if self._prefixed else self.body
        (self.compressor.decompress_add if add else self.compressor.decompress)(body, out)

    def outgoing(self) -> np.ndarray | PrefixedMemory:
        """Return what to send; its bytes, if their number varies, are known once the payload is written."""
        return self._prefixed or self.memory

    def codec_words(self, **words: int) -> np.ndarray:
        """Return the words of a call of the compressor's codec; the caller keeps them."""
        codec = self.compressor.codec
        assert codec is not None
        made = np.zeros(instructions.CODEC_WORDS, np.int64)
        words |= {"nbytes": self.body.size, "settings": codec.settings.ctypes.data}
        words |= {"settings_length": codec.settings.size}
        words |= {"length": self.memory.ctypes.data} if self._prefixed else {}
        for name, value in words.items():
            made[getattr(instructions, f"CODEC_{name.upper()}")] = value
        return made


class Encode:
    """The call that writes the payload of `x`, elements from number `first` on, with the key of a `shot`."""

    def __init__(self, x: Memory, chunk: CompressedChunk, keys: NextKeys, shot: int, first: int) -> None:
        self.x, self.chunk, self._keys, self._shot, self._first = x, chunk, keys, shot, first

    def __call__(self) -> None:
        """Make the call from Python."""
        self.chunk.compress(present(self.x), self._keys.key(self._shot, self._first))

    def instruction(self) -> Instruction | None:
        """Return the instruction; None if the compressor has no codec."""
        codec = self.chunk.compressor.codec
        address = 0 if codec is None else codec_kernels.address_of(codec.encode)
        if not address:
            return None
        self._codec = codec  # the words have the address of its settings
        self._words = self.chunk.codec_words(keys=self._keys.key_words(self._shot).ctypes.data, first=self._first)
        places = {"out": self.chunk.body, "left": self.x, "right": self._words}
        numbers = _codec_numbers(address, self.x.size)
        return Instruction(instructions.ENCODE, places, numbers, self.chunk.memory, (self.x,))


class Decode:
    """The call that writes the elements of a payload to `out`, or adds them there."""

    def __init__(self, chunk: CompressedChunk, out: np.ndarray, *, add: bool = False) -> None:
        self.chunk, self.out, self._add = chunk, out, add

    def __call__(self) -> None:
        """Make the call from Python; raise CorruptPayload if the payload cannot be one of so many elements."""
        self.chunk.decompress(self.out, add=self._add)

    def instruction(self) -> Instruction | None:
        """Return the instruction; None if the compressor has no codec."""
        codec = self.chunk.compressor.codec
        address = 0 if codec is None else codec_kernels.address_of(codec.decode)
        if not address:
            return None
        self._codec = codec
        self._words = self.chunk.codec_words(add=int(self._add))
        places = {"out": self.out, "left": self.chunk.body, "right": self._words}
        reads = (self.out, self.chunk.memory) if self._add else (self.chunk.memory,)
        return Instruction(instructions.DECODE, places, _codec_numbers(address, self.out.size), self.out, reads)


def _codec_numbers(address: int, count: int) -> dict[str, int]:
    return {"function": address, "count": count, "itemsize": _VALUES.itemsize}
