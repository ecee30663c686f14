"""Parameters of a shard with their optimizer, as its server and the servers of its replicas hold them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mpicoll.compression import Key
from mpicoll.kernels import optimizer_updates
from mpicoll.optim.optimizers import OPTIMIZERS
from mpicoll.parameter_server.partition import Settings
from mpicoll.parameter_server.server_state import packed, part_of
from mpicoll.parameter_server.shard_memory import codec_of


class ShardParameters:
    """Parameters, optimizer and version of a shard.

    Parameters
    ----------
    bounds
        Index of the shard's first element and of the one after its last.
    initial : (count,) of `settings.dtype`
        The initial parameters of all shards.
    state
        A state to continue from in place of `initial`, or None.

    Attributes
    ----------
    parameters : (stop - start,) of `settings.dtype`
        Updated in place.
    version
        Number of pushes that have been applied.
    codec
        Number of the encoding of pushed gradients; 0 for none.
    """

    def __init__(
        self,
        settings: Settings,
        bounds: tuple[int, int],
        initial: np.ndarray,
        state: Mapping[str, np.ndarray] | None,
    ) -> None:
        start, stop = bounds
        self.version = 0
        self.parameters = initial[start:stop].copy()
        self._optimizer = OPTIMIZERS[settings.optimizer](self.parameters, dict(settings.hyper))
        self.codec = codec_of(settings.compressor, start, stop)
        self._compressor = None if settings.compressor is None else settings.compressor.part(start, stop)
        self._gradient = np.empty(0 if self._compressor is None else stop - start, np.float32)
        if state is not None:
            self.version = int(state["version"].min())
            part_of(state, start, stop, self._optimizer)
        self._compile(settings)

    def _compile(self, settings: Settings) -> None:
        """Compile the kernels before other ranks wait for this one."""
        nothing = self.parameters[:0].copy()
        optimizer_updates.checksum(np.empty(0, np.uint32), np.uint64(0))
        OPTIMIZERS[settings.optimizer](nothing, dict(settings.hyper)).apply(nothing, 0.0)
        if self._compressor is not None:
            payload = np.empty(self._compressor.wire_nbytes(self._gradient.size) // 4, np.uint32).view(np.uint8)
            self._gradient[:] = 0
            self._compressor.decompress(
                payload[: self._compressor.compress(self._gradient, payload, Key())], self._gradient
            )

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters and of the optimizer's state."""
        return (1 + len(self._optimizer.state)) * self.parameters.nbytes

    @property
    def part_itemsize(self) -> int:
        """Bytes of an element, if a push may be for a part of the shard; 0 if it is always for all of it."""
        return 0 if self._compressor is not None else self.parameters.itemsize

    def decoded(self, payload: np.ndarray) -> np.ndarray:
        """Return the gradient of a payload; valid until the next call."""
        if self._compressor is None:
            return payload.view(self.parameters.dtype)
        self._compressor.decompress(payload, self._gradient)
        return self._gradient

    def apply(self, gradient: np.ndarray, rate: float, first: int = 0, pushes: int = 1) -> None:
        """Apply the gradient, or sum of gradients, of so many pushes to the elements from `first` on.

        A step for several parts of the elements has its pushes in the first call, and 0 in those for the other parts.
        """
        if pushes == 0:
            self._optimizer.steps -= 1
        self._optimizer.apply(gradient, rate, first)
        self.version += pushes

    def packed(self, published: np.ndarray | None) -> np.ndarray:
        """Return a message with copies of all state; see :mod:`mpicoll.parameter_server.server_state`."""
        return packed(self._optimizer, self.version, published)
