"""PyTorch on mpicoll: a backend of ``torch.distributed``, compressed gradients, and Horovod's interface.

Importing this package registers the backend, and needs PyTorch:

>>> import torch.distributed as dist
>>> import mpicoll.torch
>>> dist.init_process_group("mpicoll")  # under mpirun or srun; no environment variables

Raises
------
ImportError
    If PyTorch is not installed; the message says how to install it.
"""

from __future__ import annotations

try:
    import torch.distributed as _dist
except ImportError as error:
    raise ImportError('mpicoll.torch: PyTorch is missing; pip install "mpicoll[torch]"', name="torch") from error
if not _dist.is_available():
    raise ImportError("mpicoll.torch: this PyTorch was built without torch.distributed", name="torch")

from mpicoll.torch import process_group, rendezvous, shared_buckets
from mpicoll.torch.async_optimizer import AsyncOptimizer
from mpicoll.torch.comm_hooks import CompressionHook, hook
from mpicoll.torch.distributed_optimizer import DistributedOptimizer, broadcast_optimizer_state, broadcast_parameters
from mpicoll.torch.grouped_calls import (
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
)
from mpicoll.torch.local_optimizer import LocalSGD
from mpicoll.torch.process_group import ProcessGroup
from mpicoll.torch.row_exchanges import (
    alltoall,
    alltoall_async,
    reducescatter,
    reducescatter_async,
)
from mpicoll.torch.tensor_communicator import (
    Average,
    Compression,
    Max,
    Min,
    Product,
    Sum,
    allgather,
    allgather_async,
    allgather_object,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    broadcast_object,
)
from mpicoll.torch.tensor_memory import empty
from mpicoll.torch.world import (
    barrier,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    poll,
    rank,
    rocm_built,
    shutdown,
    size,
    synchronize,
)

__all__ = [
    "AsyncOptimizer",
    "Average",
    "Compression",
    "CompressionHook",
    "DistributedOptimizer",
    "LocalSGD",
    "Max",
    "Min",
    "ProcessGroup",
    "Product",
    "Sum",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "empty",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "hook",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "rocm_built",
    "shutdown",
    "size",
    "synchronize",
]

rendezvous.install()
process_group.register()
shared_buckets.install()
