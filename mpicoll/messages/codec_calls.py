"""Calls of codecs between the messages of a plan: keys of random choices, payloads written and read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mpicoll.compression import Compressor, Key
from mpicoll.kernels import instructions
from mpicoll.kernels.codecs import codec_kernels, counter_random
from mpicoll.kernels.codecs.codec_kernels import Codec
from mpicoll.messages.calls import Allocate, Instruction, Memory, present
from mpicoll.messages.prefixed_sends import PREFIX_NBYTES, PrefixedMemory

if TYPE_CHECKING:
    from mpicoll.communicator.channel import Channel

_ALIGNMENT = 64
_CODES = np.dtype(np.uint8)
_VALUES = np.dtype(np.float32)
SHOTS = 2
"""Number of times that an operation compresses at most; no two operations of a rank have a key in common."""


class NextKeys:
    """The call that numbers an operation and makes the keys of its random choices: one for each time it compresses.

    Parameters
    ----------
    counter : (1,) int64, optional
        The number of the last operation; that of the channel by default.

    Attributes
    ----------
    words : (1 + SHOTS,) uint64
        The number of the operation, and the keys.
    """

    def __init__(self, channel: Channel, counter: np.ndarray | None = None) -> None:
        self._counter = channel.compression_counter if counter is None else counter
        self._rank = channel.identity
        self.words = np.zeros(1 + SHOTS, np.uint64)
        self._stream = np.array(counter_random.stream(0, self._rank), np.uint64).view(np.int64).item()

    def key(self, shot: int, first: int) -> Key:
        """Return the key of the present operation for a vector that begins at element `first`."""
        return Key(0, self._rank, SHOTS * int(self.words[0]) + shot, first)

    def key_words(self, shot: int) -> np.ndarray:
        """Return the words of that key, uint32 of shape (2,), which change with every operation."""
        return self.words[1 + shot : 2 + shot].view(np.uint32)

    def __call__(self) -> None:
        """Number the operation, from Python."""
        self._counter += 1
        self.words[0] = self._counter[0]
        for shot in range(SHOTS):
            self.key_words(shot)[:] = self.key(shot, 0).words()

    def instruction(self) -> Instruction:
        """Return the instruction."""
        places = {"out": self.words, "right": self._counter}
        return Instruction(instructions.NEXT_KEYS, places, {"count": SHOTS, "left": self._stream})


class EncodedMemory:
    """Memory that an encoder writes and a decoder reads, to be sent or received, or to be kept.

    Parameters
    ----------
    codec
        Its encoder, decoder and settings; None if only the interpreter can call them.
    nbytes
        Room for what the encoder writes.
    varies
        Whether the length of it depends on data; 8 bytes with the length then precede it.
    """

    def __init__(self, codec: Codec | None, nbytes: int, varies: bool, allocate: Allocate) -> None:
        self.codec = codec
        nbytes += varies * PREFIX_NBYTES
        # Each on cache lines of its own.
        self.memory = allocate(-(-nbytes // _ALIGNMENT) * _ALIGNMENT, _CODES)[:nbytes]
        self.prefixed = PrefixedMemory(self.memory) if varies else None
        self.body = self.prefixed.body if self.prefixed else self.memory
        if codec is not None:  # compiled now if that is needed, while no rank waits for another
            codec_kernels.address_of(codec.encode)
            codec_kernels.address_of(codec.decode)

    def part(self, first: int) -> tuple[int, ...]:
        """Return numbers that say which part of the encoder's input is written; none for all of it."""
        return ()

    def encode(self, x: np.ndarray, key: Key) -> int:
        """Write the body, and return its length in bytes."""
        assert self.codec is not None
        return int(self.codec.encode(x, self.body, self.codec.settings, key.words(), key.first))

    def compress(self, x: np.ndarray, key: Key) -> None:
        """Write what stands for `x`, and its length if that varies."""
        nbytes = self.encode(x, key)
        if self.prefixed:
            self.prefixed.length[0] = nbytes

    def decompress(self, out: np.ndarray, *, add: bool) -> None:
        """Decode it to `out`, or add it to `out`.

        Raises
        ------
        CorruptPayload
            If it cannot stand for ``out.size`` elements.
        """
        raise NotImplementedError

    def written(self) -> np.ndarray:
        """Return the part of the body that was written or received; raise CorruptPayload if there is no such part."""
        return self.prefixed()[PREFIX_NBYTES:] if self.prefixed else self.body

    def outgoing(self) -> np.ndarray | PrefixedMemory:
        """Return what to send; its bytes, if their number varies, are known once it is written."""
        return self.prefixed or self.memory

    def codec_words(self, **words: int) -> np.ndarray:
        """Return the words of a call of the codec; the caller keeps them."""
        assert self.codec is not None
        made, settings = np.zeros(instructions.CODEC_WORDS, np.int64), self.codec.settings
        words |= {"nbytes": self.body.size, "settings": settings.ctypes.data, "settings_length": settings.size}
        words |= {"length": self.memory.ctypes.data} if self.prefixed else {}
        for name, value in words.items():
            made[getattr(instructions, f"CODEC_{name.upper()}")] = value
        return made


class CompressedChunk(EncodedMemory):
    """Memory for the payload of `count` elements."""

    def __init__(self, compressor: Compressor, count: int, allocate: Allocate) -> None:
        nbytes = compressor.wire_nbytes(count) if count else 0
        super().__init__(compressor.codec, nbytes, count > 0 and not compressor.fixed, allocate)
        self.compressor = compressor

    def encode(self, x: np.ndarray, key: Key) -> int:
        """Write the payload of `x`, and return its length in bytes."""
        return self.compressor.compress(x, self.body, key)

    def decompress(self, out: np.ndarray, *, add: bool) -> None:
        """Decode the payload to `out`, or add it to `out`."""
        (self.compressor.decompress_add if add else self.compressor.decompress)(self.written(), out)


class Encode:
    """The call that writes what stands for `x`, elements from number `first` on, with the key of a `shot`."""

    def __init__(self, x: Memory, target: EncodedMemory, keys: NextKeys, shot: int, first: int) -> None:
        self.x, self.target, self._keys, self._shot, self._first = x, target, keys, shot, first

    def __call__(self) -> None:
        """Make the call from Python."""
        self.target.compress(present(self.x), self._keys.key(self._shot, self._first))

    def instruction(self) -> Instruction | None:
        """Return the instruction; None if there is no compiled encoder."""
        codec = self.target.codec
        address = 0 if codec is None else codec_kernels.address_of(codec.encode)
        if not address:
            return None
        self._codec = codec  # the words have the address of its settings
        self._words = self.target.codec_words(keys=self._keys.key_words(self._shot).ctypes.data, first=self._first)
        places = {"out": self.target.body, "left": self.x, "right": self._words}
        numbers, part = _codec_numbers(address, self.x.size), self.target.part(self._first)
        return Instruction(instructions.ENCODE, places, numbers, self.target.memory, (self.x,), part)


class Decode:
    """The call that writes the elements that encoded memory stands for to `out`, or adds them there."""

    def __init__(self, source: EncodedMemory, out: Memory, *, add: bool = False) -> None:
        self.source, self.out, self._add = source, out, add

    def __call__(self) -> None:
        """Make the call from Python; raise CorruptPayload if the memory cannot stand for so many elements."""
        self.source.decompress(present(self.out), add=self._add)

    def instruction(self) -> Instruction | None:
        """Return the instruction; None if there is no compiled decoder."""
        codec = self.source.codec
        address = 0 if codec is None else codec_kernels.address_of(codec.decode)
        if not address:
            return None
        self._codec = codec
        self._words = self.source.codec_words(add=int(self._add))
        places = {"out": self.out, "left": self.source.body, "right": self._words}
        reads = (self.out, self.source.memory) if self._add else (self.source.memory,)
        return Instruction(instructions.DECODE, places, _codec_numbers(address, self.out.size), self.out, reads)


def _codec_numbers(address: int, count: int) -> dict[str, int]:
    return {"function": address, "count": count, "itemsize": _VALUES.itemsize}
