"""Models whose training steps are timed by bench.torch_backend: a perceptron, a residual network and a transformer."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
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


def ddp_steps(name: str, group: Any, *, bucket_views: bool = False) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return a training step of DistributedDataParallel, and the same without synchronisation.

    Parameters
    ----------
    bucket_views
        Whether gradients are views of the buckets (``gradient_as_bucket_view``), so that none is copied back.
    """
    workload = made(name)
    model = nn.parallel.DistributedDataParallel(
        workload.model, process_group=group, gradient_as_bucket_view=bucket_views
    )
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


class LanguageRun:
    """Training of the transformer to predict the next byte of a text, with DistributedDataParallel.

    Parameters
    ----------
    group
        The process group.
    hook
        Communication hook; None for none.
    batch
        Texts of a rank in a step.
    """

    def __init__(self, group: Any, hook: Any = None, batch: int = 4) -> None:
        self.model = nn.parallel.DistributedDataParallel(made("transformer").model, process_group=group)
        if hook is not None:
            self.model.register_comm_hook(None, hook)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3)
        text = Path(argparse.__file__).read_bytes()
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self._batch, self._random = batch, torch.Generator().manual_seed(1 + group.rank())

    def step(self) -> float:
        """Take a step, and return the loss of this rank's texts."""
        places = torch.randint(0, len(self._text) - CONTEXT, (self._batch, 1), generator=self._random)
        texts = self._text[places + torch.arange(CONTEXT + 1)]
        self._optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(texts[:, :-1]).transpose(1, 2), texts[:, 1:])
        loss.backward()
        self._optimizer.step()
        return float(loss)

    def step_alone(self) -> None:
        """Take a step without synchronisation."""
        with self.model.no_sync():
            self.step()


def _units(model: nn.Module) -> list[nn.Module]:
    """Return the parts of a model that FSDP gathers one at a time."""
    parts = model.layers if isinstance(model, Transformer) else model
    assert isinstance(parts, (nn.ModuleList, nn.Sequential))
    return [part for part in parts if any(True for _ in part.parameters())]


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()
