"""A program in Horovod's style on mpicoll: only the import differs from one for Horovod.

A network learns the area and the perimeter of rectangles; gradients are reduced while the backward pass goes on, and
compressed if you like. Needs PyTorch: pip install "mpicoll[torch]".

    mpirun -n 4 python examples/torch_horovod_style.py
    mpirun -n 4 python examples/torch_horovod_style.py --compression int8
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks are the threads; set before PyTorch is loaded

import torch

import mpicoll.torch as hvd


def rectangles(count, seed):
    """Return sides of rectangles, and their areas and perimeters."""
    sides = torch.rand(count, 2, generator=torch.Generator().manual_seed(seed))
    return sides, torch.stack([sides.prod(1), 2 * sides.sum(1)], 1)


def main():
    """Train, and compare the models of all ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--size", type=int, default=256, help="rectangles of a rank")
    parser.add_argument("--compression", help="such as int8 or topk:0.1")
    options = parser.parse_args()

    hvd.init()
    torch.manual_seed(hvd.rank())  # the models differ until the first one is broadcast
    model = torch.nn.Sequential(torch.nn.Linear(2, 128), torch.nn.Tanh(), torch.nn.Linear(128, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=options.compression)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    sides, wanted = rectangles(options.size, seed=hvd.rank())
    for _ in range(options.steps):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(sides), wanted).backward()
        optimizer.step()

    sides, wanted = rectangles(1000, seed=-1 - hvd.rank())
    error = hvd.allreduce((model(sides) - wanted).detach().abs().mean())
    own = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    assert torch.equal(own, hvd.broadcast(own, root_rank=0)), "the models of the ranks differ"
    assert error < 0.1, f"error: {error:.3f}"
    if hvd.rank() == 0:
        print(f"{hvd.size()} ranks, mean error {error:.4f}, equal models on all ranks")


if __name__ == "__main__":
    main()
