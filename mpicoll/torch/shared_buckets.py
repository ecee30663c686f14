"""Gradient buckets of DistributedDataParallel in the memory that the ranks of a node share.

The reducer of DistributedDataParallel is compiled code. It asks the group's backend for memory by a call that carries
``TensorOptions``, which PyTorch cannot hand to a backend written in Python. Its buckets are vectors that ``at::empty``
makes while the reducer is constructed, and again when it divides the gradients anew after the first step. A dispatch
mode is active during both, and answers these calls with shared memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from mpicoll.shared_memory.numpy_allocator import MIN_NBYTES
from mpicoll.torch.base_group import BaseGroup
from mpicoll.torch.tensor_memory import empty

_EMPTY = torch.ops.aten.empty.memory_format


class SharedVectors(TorchDispatchMode):
    """Dispatch mode in which vectors of at least 16 KB that ``torch.empty`` makes on the CPU lie in shared memory."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Return a shared tensor for a long vector, and what PyTorch makes for everything else."""
        options = kwargs or {}
        if func is _EMPTY and len(args) == 1 and len(args[0]) == 1 and _is_ordinary(options):
            dtype = options.get("dtype") or torch.get_default_dtype()
            if args[0][0] * dtype.itemsize >= MIN_NBYTES:
                return empty(args[0][0], dtype=dtype)
        return func(*args, **options)


def _is_ordinary(options: Mapping[str, Any]) -> bool:
    """Return whether options of ``torch.empty`` ask for dense, pageable memory of the CPU."""
    device, layout = options.get("device"), options.get("layout")
    return (
        (device is None or device.type == "cpu")
        and layout in (None, torch.strided)
        and not options.get("pin_memory")
        and options.get("memory_format") is None
    )


class Reducer(dist.Reducer):
    """Reducer of DistributedDataParallel whose buckets lie in shared memory if its process group is mpicoll's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._is_shared = any(isinstance(each, BaseGroup) for each in (*args, *kwargs.values()))
        with self._allocation():
            super().__init__(*args, **kwargs)

    def _rebuild_buckets(self) -> bool:
        with self._allocation():
            return bool(super()._rebuild_buckets())

    def _allocation(self) -> AbstractContextManager[Any]:
        """Return the context in which buckets are made; one that does nothing inside a mode of somebody else."""
        return SharedVectors() if self._is_shared and _get_current_dispatch_mode() is None else nullcontext()


def install() -> None:
    """Have DistributedDataParallel use :class:`Reducer`; nothing happens the second time."""
    if not issubclass(dist.Reducer, Reducer):
        dist.Reducer = Reducer
