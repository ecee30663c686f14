"""Checked arguments of a collective: the vector as one run of elements, and the caller's buffers that hold it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpicoll.buffers.flat_buffer import Buffer, view_at
from mpicoll.buffers.reduction_ops import Reducer
from mpicoll.communicator.channel import Channel
from mpicoll.compression import Compressor, ErrorFeedback, Key
from mpicoll.kernels import reduce as kernels
from mpicoll.messages.call_agreement import PairLengths
from mpicoll.progress.call_signature import Signature
from mpicoll.schedules import COLLECTIVES


@dataclass(frozen=True)
class VectorPart:
    """Elements ``start`` to ``stop - 1`` of the vector; they lie in `buffer` from element `displ` on."""

    buffer: Buffer
    start: int
    stop: int
    displ: int = 0

    def address(self, carrier: np.dtype[Any]) -> int:
        """Return the address of the first element."""
        return self.buffer.address + self.displ * carrier.itemsize

    def view(self, carrier: np.dtype[Any]) -> np.ndarray:
        """Return the elements in the caller's buffer."""
        return view_at(self.address(carrier), self.stop - self.start, carrier)


@dataclass
class CheckedArguments:
    """Checked arguments of a collective.

    Attributes
    ----------
    count, dtype
        Number of elements of the whole vector, and their type.
    counts
        Elements per rank, for collectives in which ranks own parts of the vector; None for other collectives.
    given, result
        The parts of the vector that the caller's buffers supply and receive; None if there is none.
    source, target
        Buffers that hold the whole vector and may be used in place of copies: `source` is only read, `target` written.
    """

    channel: Channel
    collective: str
    title: str
    algorithm: str
    count: int
    dtype: np.dtype[Any]
    given: VectorPart | None
    result: VectorPart | None
    source: Buffer | None = None
    target: Buffer | None = None
    counts: tuple[int, ...] | None = None
    recvcounts: tuple[int, ...] | None = None
    """Elements received from each rank in an alltoall, if `counts` are only those sent."""
    uneven: bool = False
    """Whether each rank knows only its own counts, so that they cannot be compared between ranks."""
    idle: bool = False
    """Whether this rank knows only its own counts and has no elements, so that it does not know their type."""
    root: int = 0
    tells: str = ""
    """The collective whose counts the root tells by this broadcast."""
    op_name: str = ""
    reducer: Reducer | None = None
    ordered: bool = False
    """Whether operands must be combined in rank order."""
    compression: Compressor | ErrorFeedback | None = None
    """Compressor of the messages, or None; see :func:`mpicoll.collectives.compressed.algorithms`."""
    persistent: bool = False
    """Whether it is a persistent operation, which ranks may start in different orders."""
    is_part: bool = False
    """Whether it is a part of another operation, whose plan starts this one's."""
    whole: Signature | None = None
    """Signature of the call that this is a part of, which ranks on shared memory compare; None for calls themselves."""
    keys: Callable[[], Key] | None = None
    """Returns the key of random choices of the operation that starts now; None for that of the communicator."""
    counter: np.ndarray | None = None
    """Number of the operation before this one, for keys of random choices; None for the channel's counter."""
    kept: Any = None
    """Memory that must live as long as these arguments."""

    @property
    def nbytes(self) -> int:
        """Bytes of the whole vector."""
        return self.count * self.dtype.itemsize

    @property
    def carrier(self) -> np.dtype[Any]:
        """The type in which kernels see the elements."""
        return kernels.carrier(self.dtype)

    def signature(self) -> Signature:
        """Return the signature of the call, which must be equal on all ranks."""
        parts = [f"root={self.root}"] if COLLECTIVES[self.collective].rooted else []
        parts.append(f"algorithm={self.algorithm}")
        if self.uneven:
            return Signature.in_part(self.title, f"dtype={self.dtype}", ", ".join(parts), known=not self.idle)
        count = f"count={self.count}" if self.counts is None else f"counts={_short(self.counts)}"
        operation = [f"op={self.op_name}"] if self.op_name else []
        if self.compression is not None:
            parts.insert(-1, f"compression={self.compression}")
        elements = [] if self.collective == "barrier" else [count, f"dtype={self.dtype}"]
        return Signature.of(f"{self.title}({', '.join([*elements, *operation, *parts])})")

    def pair_lengths(self) -> PairLengths | None:
        """Return what this rank sends to each rank and expects from each; None if all ranks know all counts."""
        if not self.uneven or self.counts is None:
            return None
        nbytes = [count * self.dtype.itemsize for count in self.counts]
        if self.collective == "alltoall":
            return PairLengths(nbytes, [count * self.dtype.itemsize for count in self.recvcounts or self.counts])
        rank, nothing = self.channel.rank, [0] * self.channel.size
        own = [nbytes[rank] if peer == self.root else 0 for peer in range(self.channel.size)]
        at_root = nbytes if rank == self.root else nothing
        return PairLengths(own, at_root) if self.collective == "gather" else PairLengths(at_root, own)

    def refresh(self) -> None:
        """Copy the present contents of arrays into the copies of them; persistent operations start with it."""
        for buffer in {id(b): b for b in (self.source, self.target, self.given and self.given.buffer) if b}.values():
            buffer.take_in()


def _short(counts: tuple[int, ...]) -> str:
    return str(list(counts)) if len(counts) <= 16 else f"{list(counts[:8])}... (hash {hash(counts) & 0xFFFFFFFF:08x})"
