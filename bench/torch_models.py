"""Models whose training steps are timed by bench.torch_backend: a perceptron, a residual network and a transformer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

PERCEPTRON_WIDTHS = (1024, 2048, 2048, 1792, 128)
"""Layers of the perceptron, which has ten million parameters."""
CHANNELS = (64, 128, 256, 512)
"""Channels of the residual network's four stages, of two blocks each: those of ResNet-18 (He et al. 2015, table 1)."""
PIXELS, CLASSES = 16, 10
WIDTH, HEADS, LAYERS, CONTEXT, LETTERS = 256, 4, 4, 64, 256
"""Of the transformer, which has three million parameters."""


class Workload(NamedTuple):
    """A model and a batch.

    Attributes
    ----------
    model
        The model, on the CPU, of float32; the same on every rank.
    inputs
        The batch, the same shape on every rank.
    """

    model: nn.Module
    inputs: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters, and of all gradients."""
        return sum(parameter.nbytes for parameter in self.model.parameters())


class ResidualBlock(nn.Module):
    """Two convolutions of 3 x 3 and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)])
        self.shortcut = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output; images of batch x channels x height x width."""
        inner = self.second(self.norms[0](self.first(x)).relu())
        return (self.norms[1](inner) + self.shortcut(x)).relu()


class Transformer(nn.Module):
    """Decoder-only transformer over bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(LETTERS, WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        )
        self.out = nn.Linear(WIDTH, LETTERS)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return scores of batch x context x letters for a text of batch x context."""
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        hidden = self.letters(text) + self.places
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        scores: torch.Tensor = self.out(hidden)
        return scores.clone()  # FSDP warns of views


def perceptron() -> Workload:
    """Return the perceptron, and 32 samples."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(PERCEPTRON_WIDTHS):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return Workload(nn.Sequential(*layers), torch.randn(32, PERCEPTRON_WIDTHS[0]))


def convolutional() -> Workload:
    """Return the residual network, of eleven million parameters, and 8 images."""
    layers: list[nn.Module] = [nn.Conv2d(3, CHANNELS[0], 3, 1, 1, bias=False), nn.BatchNorm2d(CHANNELS[0]), nn.ReLU()]
    for inputs, outputs in zip((CHANNELS[0], *CHANNELS), CHANNELS, strict=False):
        layers += [ResidualBlock(inputs, outputs, 1 + (inputs != outputs)), ResidualBlock(outputs, outputs, 1)]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(CHANNELS[-1], CLASSES)]
    return Workload(nn.Sequential(*layers), torch.randn(8, 3, PIXELS, PIXELS))


def transformer() -> Workload:
    """Return the transformer, and 4 texts."""
    return Workload(Transformer(), torch.randint(0, LETTERS, (4, CONTEXT)))


WORKLOADS: Mapping[str, Callable[[], Workload]] = {
    "perceptron": perceptron,
    "convolutional": convolutional,
    "transformer": transformer,
}


def made(name: str) -> Workload:
    """Return a model by name, with the same weights on every rank."""
    torch.manual_seed(0)
    return WORKLOADS[name]()


def ddp_steps(name: str, group: Any) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return a training step of DistributedDataParallel, and the same without synchronisation."""
    workload = made(name)
    model = nn.parallel.DistributedDataParallel(workload.model, process_group=group)
    step = partial(_step, model, torch.optim.SGD(model.parameters(), 1e-3), workload.inputs)

    def step_alone() -> None:
        with model.no_sync():
            step()

    return step, step_alone


def fsdp_step(name: str, group: Any, *, shares_buffers: bool = False) -> Callable[[], None]:
    """Return a training step of FSDP (``fully_shard``), in which each layer is a unit.

    Parameters
    ----------
    shares_buffers
        Whether FSDP takes its buffers from the process group.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    workload = made(name)
    mesh = DeviceMesh.from_group(group, "cpu")
    for part in (*_units(workload.model), workload.model):
        sharded = fully_shard(part, mesh=mesh)
        if shares_buffers:
            sharded.set_allocate_memory_from_process_group_for_comm(True)
    return partial(_step, workload.model, torch.optim.SGD(workload.model.parameters(), 1e-3), workload.inputs)


def _units(model: nn.Module) -> list[nn.Module]:
    """Return the parts of a model that FSDP gathers one at a time."""
    parts = model.layers if isinstance(model, Transformer) else model
    assert isinstance(parts, (nn.ModuleList, nn.Sequential))
    return [part for part in parts if any(True for _ in part.parameters())]


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()
