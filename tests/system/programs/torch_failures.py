"""A backward pass of DistributedDataParallel in which rank 1 does not do what the others do: JSON of what each met."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import mpicoll.torch

TIMEOUT = 2.0


def stop_for(seconds: float) -> None:
    """Stop this process; a child continues it."""
    if os.fork() == 0:
        time.sleep(seconds)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)


def step(model: torch.nn.Module) -> None:
    model(torch.ones(8, 300)).sum().backward()


def main(how: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("mpicoll", timeout=timedelta(seconds=TIMEOUT))
    rank = dist.get_rank()
    model = DistributedDataParallel(torch.nn.Linear(300, 300))
    if how == "compressed":
        model.register_comm_hook(None, mpicoll.torch.hook("int8"))
    for _ in range(3):
        step(model)
    dist.barrier()
    began = time.monotonic()
    error = None
    try:
        if rank == 1 and how in ("other call", "compressed"):
            dist.broadcast(torch.ones(90), 0)
        if rank == 1 and how == "stopped":
            stop_for(2 * TIMEOUT)
        if rank == 1 and how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        step(model)
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    line = json.dumps({"rank": rank, "error": error, "seconds": time.monotonic() - began}) + "\n"
    os.write(1, line.encode())  # in one piece


if __name__ == "__main__":
    main(sys.argv[1])
