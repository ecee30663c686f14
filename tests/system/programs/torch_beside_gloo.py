"""Groups of mpicoll beside a default group of gloo, whose ranks are those of MPI in reverse."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from mpi4py import MPI

import mpicoll.torch  # noqa: F401 - registers the backend

TIMEOUT = timedelta(seconds=20)


def main() -> None:
    torch.set_num_threads(1)
    store, rank, size = next(dist.rendezvous("mpicoll://"))
    dist.init_process_group("mpicoll", store=dist.PrefixStore("first", store), rank=rank, world_size=size)
    dist.destroy_process_group()
    rank = size - 1 - MPI.COMM_WORLD.rank
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("second", store), rank=rank, world_size=size, timeout=TIMEOUT
    )
    for members in (list(range(size)), list(range(1, size))):
        group = dist.new_group(members, backend="mpicoll")
        if rank in members:
            outputs = [torch.zeros(1) for _ in members]
            dist.all_gather(outputs, torch.tensor([float(rank)]), group)
            assert [int(each) for each in outputs] == members, outputs
            assert dist.get_backend(group) == "mpicoll"
    dist.barrier()  # of gloo
    dist.destroy_process_group()
    os.write(1, f"rank {rank} is done\n".encode())  # in one piece


if __name__ == "__main__":
    main()
