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

from mpicoll.torch import process_group, rendezvous
from mpicoll.torch.comm_hooks import CompressionHook, hook
from mpicoll.torch.process_group import ProcessGroup

__all__ = ["CompressionHook", "ProcessGroup", "hook"]

rendezvous.install()
process_group.register()
