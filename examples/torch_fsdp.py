"""Fully sharded data parallelism on mpicoll: a small transformer learns to add, from text that is made here.

Each rank holds a part of every parameter and has its own samples. Needs PyTorch: pip install "mpicoll[torch]"

    mpirun -n 4 python examples/torch_fsdp.py
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks are the threads; set before PyTorch is loaded

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import mpicoll.torch  # noqa: F401, registers the backend

LENGTH, LETTERS = 8, "0123456789+="


def text(count, generator):
    """Return lines such as ``03+58=61`` as numbers of letters."""
    pairs = torch.randint(0, 50, (count, 2), generator=generator).tolist()
    lines = [f"{a:02d}+{b:02d}={a + b:02d}" for a, b in pairs]
    return torch.tensor([[LETTERS.index(letter) for letter in line] for line in lines])


class Transformer(torch.nn.Module):
    """Predicts each letter from those before it."""

    def __init__(self, width=64, heads=4, layers=2):
        super().__init__()
        self.letters = torch.nn.Embedding(len(LETTERS), width)
        self.places = torch.nn.Parameter(0.02 * torch.randn(LENGTH - 1, width))
        layer = {"nhead": heads, "dim_feedforward": 4 * width, "dropout": 0.0, "batch_first": True, "norm_first": True}
        self.layers = torch.nn.ModuleList(torch.nn.TransformerEncoderLayer(width, **layer) for _ in range(layers))
        self.out = torch.nn.Linear(width, len(LETTERS))

    def forward(self, line):
        """Return a score for each letter of the alphabet at each place."""
        mask = torch.nn.Transformer.generate_square_subsequent_mask(LENGTH - 1)
        hidden = self.letters(line) + self.places
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return self.out(hidden).clone()  # FSDP warns of views


def main():
    """Train, and compare the loss of the sums' digits with that of a guess."""
    parser = argparse.ArgumentParser(description="A transformer by FSDP.")
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    dist.init_process_group("mpicoll")
    torch.manual_seed(0)
    model, mesh = Transformer(), init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    for _ in range(steps):
        line = text(64, generator)
        scores = model(line[:, :-1])[:, 5:]  # of the two digits behind "="
        loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), line[:, 6:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    mean, parts = loss.detach(), [parameter.to_local().numel() for parameter in model.parameters()]
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    assert mean < 2.0, f"loss: {mean:.3f}, that of a guess is 2.3"
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, loss {mean:.3f}, {sum(parts)} parameters on this rank")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
