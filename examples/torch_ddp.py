"""DistributedDataParallel on mpicoll: a perceptron learns which of two rings a point lies on.

Each rank has its own points; gradients are averaged by ``torch.distributed`` with the backend mpicoll, compressed or
not. Needs PyTorch: pip install "mpicoll[torch]".

    mpirun -n 4 python examples/torch_ddp.py
    mpirun -n 4 python examples/torch_ddp.py --compression topk:0.1
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks are the threads; set before PyTorch is loaded

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import mpicoll.torch


def points(count, seed):
    """Return points near two rings, and the number of the ring of each."""
    generator = torch.Generator().manual_seed(seed)
    ring = torch.randint(0, 2, (count,), generator=generator)
    angle = 2 * torch.pi * torch.rand(count, generator=generator)
    radius = 1.0 + ring + 0.2 * torch.randn(count, generator=generator)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], 1), ring


def main():
    """Train, and compare the models of all ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--size", type=int, default=500, help="points of a rank")
    parser.add_argument("--compression", help="such as int8 or topk:0.1")
    options = parser.parse_args()

    dist.init_process_group("mpicoll")
    torch.manual_seed(0)
    layers = [torch.nn.Linear(2, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    if options.compression:
        model.register_comm_hook(None, mpicoll.torch.hook(options.compression))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.0 if options.compression else 0.9)

    x, ring = points(options.size, seed=dist.get_rank())
    for _ in range(options.steps):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), ring).backward()
        optimizer.step()

    x, ring = points(2000, seed=-1 - dist.get_rank())
    right = (model(x).argmax(1) == ring).sum()
    dist.all_reduce(right)
    accuracy = right.item() / (2000 * dist.get_world_size())

    own = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    first = own.clone()
    dist.broadcast(first, src=0)
    assert torch.equal(own, first), "the models of the ranks differ"
    assert accuracy > 0.9, f"accuracy: {accuracy:.3f}"
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, accuracy {accuracy:.3f}, equal models on all ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
