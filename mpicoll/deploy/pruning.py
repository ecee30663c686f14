"""Pruning of single weights by magnitude, and of whole channels, while the model is trained further."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Protocol

import numpy as np
from mpi4py import MPI

from mpicoll.deploy.deployed_model import DeployedModel
from mpicoll.deploy.magnitude_selection import largest
from mpicoll.models.layers import Arrays
from mpicoll.train.loop import Loop, LoopCallback

Parameters = Sequence[Arrays]
"""Weight and bias of each layer."""
_RAMP = 0.6
"""Part of the steps in which the sparsity rises; in the others the remaining weights recover."""
_UPDATES = 100
"""Times at most that weights are chosen while the sparsity rises."""


class Pruning(Protocol):
    """Rule that chooses weights to remove."""

    def choose(self, parameters: Parameters, sparsity: float) -> None:
        """Choose what is removed at a sparsity; what is 0 already stays so. Collective."""

    def apply(self, parameters: Parameters) -> None:
        """Set to 0 what was chosen, in place."""


def kept_count(count: int, sparsity: float) -> int:
    """Return the number of elements that remain at a sparsity, at least 1."""
    return max(1, count - round(count * sparsity))


class WeightPruning:
    """Pruning of the weights of smallest magnitude, biases excepted; a :class:`Pruning`.

    (Han et al., "Learning both weights and connections for efficient neural networks", NeurIPS 2015, section 3.)

    Parameters
    ----------
    whole
        True for one threshold of all layers, False for one of each.
    comm
        Ranks that hold the parameters.
    """

    def __init__(self, whole: bool, comm: MPI.Intracomm) -> None:
        self._whole, self._comm = whole, comm
        self.masks: list[np.ndarray] = []

    def choose(self, parameters: Parameters, sparsity: float) -> None:
        """See :class:`Pruning`."""
        weights = [arrays[0] for arrays in parameters]
        groups = [weights] if self._whole else [[weight] for weight in weights]
        self.masks = [mask for group in groups for mask in self._masks(group, sparsity)]

    def _masks(self, weights: Sequence[np.ndarray], sparsity: float) -> list[np.ndarray]:
        sizes = np.abs(np.concatenate([weight.ravel() for weight in weights]))
        mask = largest(sizes, kept_count(sizes.size, sparsity), self._comm)
        cuts = np.split(mask, np.cumsum([weight.size for weight in weights])[:-1])
        return [cut.reshape(weight.shape) for cut, weight in zip(cuts, weights, strict=True)]

    def apply(self, parameters: Parameters) -> None:
        """See :class:`Pruning`."""
        for arrays, mask in zip(parameters, self.masks, strict=True):
            np.multiply(arrays[0], mask, out=arrays[0])


class ChannelPruning:
    """Pruning of hidden units and filters; a :class:`Pruning`.

    The importance of a unit is the norm of its incoming weights times the norm of its outgoing ones. It does not change
    if a factor moves from one side of the ReLU to the other, which leaves the model the same. (After Li et al.,
    "Pruning filters for efficient convnets", ICLR 2017, who take the incoming weights alone.)

    Parameters
    ----------
    whole
        True to compare the units of all layers, of which each keeps one at least; False for the same share of each.
    comm
        Ranks that hold the parameters.
    """

    def __init__(self, whole: bool, comm: MPI.Intracomm) -> None:
        self._whole, self._comm = whole, comm
        self.masks: list[np.ndarray] = []
        """For each hidden layer, (units,) of bool."""

    def choose(self, parameters: Parameters, sparsity: float) -> None:
        """See :class:`Pruning`."""
        weights = [arrays[0] for arrays in parameters]
        scores = [_importance(before, after) for before, after in pairwise(weights)]
        if not self._whole:
            self.masks = [largest(score, kept_count(score.size, sparsity), self._comm) for score in scores]
            return
        every = np.concatenate([score / max(float(score.mean()), 1e-30) for score in scores]).astype(np.float32)
        bounds = np.cumsum([score.size for score in scores])[:-1]
        kept = max(len(scores), kept_count(every.size, sparsity))
        for score in np.split(every, bounds):
            score[int(score.argmax())] = np.float32(np.finfo(np.float32).max)
        self.masks = np.split(largest(every, kept, self._comm), bounds)

    def apply(self, parameters: Parameters) -> None:
        """See :class:`Pruning`."""
        for (weight, bias), mask in zip(parameters[:-1], self.masks, strict=True):
            np.multiply(weight, mask, out=weight)
            np.multiply(bias, mask, out=bias)


def _importance(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Return the importance of the units between two weights, (units,) of float32."""
    units = before.shape[1]
    outgoing = after.reshape(-1, units, after.shape[1])  # after a convolution, a row for each place and filter
    squares = np.square(before, dtype=np.float64).sum(axis=0) * np.square(outgoing, dtype=np.float64).sum(axis=(0, 2))
    return np.sqrt(squares).astype(np.float32)


def without_channels(model: DeployedModel, masks: Sequence[np.ndarray]) -> DeployedModel:
    """Return a model of smaller matrices, without the units that masks leave out.

    Parameters
    ----------
    masks
        For each layer but the last, (units,) of bool: those that remain.
    """
    layers, rows = [], np.ones(0, bool)
    for number, layer in enumerate(model.layers):
        columns = masks[number] if number < len(masks) else np.ones(layer.weight.shape[1], bool)
        weight = layer.weight if number == 0 else layer.weight[np.tile(rows, len(layer.weight) // len(rows))]
        layers.append(replace(layer, weight=np.ascontiguousarray(weight[:, columns]), bias=layer.bias[columns]))
        rows = columns
    return replace(model, layers=tuple(layers))


class GradualPruning(LoopCallback):
    """Callback that prunes between steps, more and more.

    The sparsity after step t of T is ``sparsity * (1 - (1 - t / T) ** 3)`` (Zhu and Gupta, "To prune, or not to prune",
    ICLR 2018 workshop, equation 1), where T is 60 % of the steps; or the whole sparsity from the first step on.

    Parameters
    ----------
    pruning
        The rule.
    sparsity
        Share of the weights, or of the channels, that are removed in the end.
    schedule
        ``"cubic"`` or ``"constant"``.
    layer_count, total_steps
        Layers of the model, and steps of the run.
    """

    def __init__(self, pruning: Pruning, sparsity: float, schedule: str, *, layer_count: int, total_steps: int) -> None:
        self._pruning, self._sparsity, self._layers = pruning, sparsity, range(layer_count)
        self._ramp = max(1, round(_RAMP * total_steps)) if schedule == "cubic" else 1
        self._every, self._chosen = max(1, self._ramp // _UPDATES), False

    def sparsity_after(self, done: int) -> float:
        """Return the sparsity after `done` steps."""
        return self._sparsity * (1 - (1 - min(done, self._ramp) / self._ramp) ** 3)

    def on_step(self, loop: Loop, done: int) -> None:
        """Prune; collective in the steps in which weights are chosen."""
        parameters = [loop.strategy.parameters(layer) for layer in self._layers]
        if done == self._ramp or (done < self._ramp and done % self._every == 0):
            self._pruning.choose(parameters, self.sparsity_after(done))
            self._chosen = True
        if self._chosen:
            self._pruning.apply(parameters)


def prune_now(pruning: Pruning, model: DeployedModel, sparsity: float, step: str) -> DeployedModel:
    """Return the model pruned at once, without training. Collective."""
    parameters = [(layer.real_weight.copy(), layer.bias.copy()) for layer in model.layers]
    pruning.choose(parameters, sparsity)
    pruning.apply(parameters)
    pairs = zip(model.layers, parameters, strict=True)
    return model.with_layers(tuple(replace(layer, weight=weight, bias=bias) for layer, (weight, bias) in pairs), step)
