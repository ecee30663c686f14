"""Backend of a process group for one device type, which PyTorch asks for its abilities and for memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mpicoll.torch.tensor_memory import empty


class GroupBackend:
    """The object that ``group._get_backend(device)`` returns: abilities of the group, and its allocator.

    PyTorch asks it in three places: before messages in a batch are put together, before times are estimated, and when
    FSDP was told to take its buffers from the process group.

    Parameters
    ----------
    group
        The process group.
    """

    supports_coalescing = False
    supports_splitting = False
    supports_time_estimate = False

    def __init__(self, group: Any) -> None:
        self._group = group

    def name(self) -> str:
        """Return the name of the backend."""
        return str(self._group.getBackendName())

    def rank(self) -> int:
        """Return the rank of this process in the group."""
        return int(self._group.rank())

    def size(self) -> int:
        """Return the number of ranks."""
        return int(self._group.size())

    def supports_tensor_alloc(self, device: Any) -> bool:
        """Return whether :meth:`allocate_tensor` has memory on a device."""
        return torch.device(device).type == "cpu"

    def allocate_tensor(self, size: int | Sequence[int], *, dtype: torch.dtype, device: Any = "cpu") -> torch.Tensor:
        """Return an uninitialised tensor in shared memory; local. See :func:`mpicoll.torch.empty`.

        Parameters
        ----------
        size
            The number of elements, or the lengths of the dimensions.

        Raises
        ------
        ValueError
            If `device` is not the CPU.
        """
        if not self.supports_tensor_alloc(device):
            raise ValueError(f"device: {device} has no memory that ranks share; the backend mpicoll is for the CPU")
        return empty(size, dtype=dtype)
