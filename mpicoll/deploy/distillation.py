"""Knowledge distillation: a model learns from the labels and from the logits of a larger one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpicoll.data.sample_subsets import UNLABELED
from mpicoll.deploy.fine_tuning import PretrainedModel
from mpicoll.deploy.inference import Inference
from mpicoll.kernels.network import softmax_cross_entropy
from mpicoll.models.layers import Layer, RandomKey
from mpicoll.models.sequential import ParameterStore


def soft_loss(logits: np.ndarray, teacher: np.ndarray, temperature: float) -> tuple[float, np.ndarray]:
    """Return the distillation loss, summed over rows, and its gradient with respect to `logits`.

    The loss of a row is ``T^2 * KL(p || q)`` with ``p = softmax(teacher / T)`` and ``q = softmax(logits / T)``; its
    gradient is ``T * (q - p)``. The factor T^2 keeps the gradient's size independent of T. (Hinton, Vinyals and Dean,
    "Distilling the knowledge in a neural network", arXiv:1503.02531, 2015, section 2.)

    Parameters
    ----------
    logits, teacher : (rows, classes) of float32 or float64

    Returns
    -------
    tuple
        The loss (float), and (rows, classes) of float64.
    """
    own, other = _log_softmax(logits / temperature), _log_softmax(teacher / temperature)
    wanted = np.exp(other)
    loss = float((wanted * (other - own)).sum())
    return temperature**2 * loss, temperature * (np.exp(own) - wanted)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True, initial=-np.inf)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


class DistilledModel(PretrainedModel):
    """Model whose training loss is ``alpha * soft_loss + (1 - alpha) * cross entropy``; see :func:`soft_loss`.

    A sample whose label is :data:`~mpicoll.data.sample_subsets.UNLABELED` has no cross entropy: the set on which
    knowledge is transferred needs no labels (Hinton, Vinyals and Dean, 2015, section 2).

    Parameters
    ----------
    layers, start
        The layers, and their initial parameters, as for :class:`~mpicoll.deploy.fine_tuning.PretrainedModel`.
    teacher
        Model whose logits are learned from; each rank computes them for its own samples. It may be collective: ranks
        ask for logits equally often, since they have equally many micro-batches, some of them perhaps empty.
    temperature
        Above 0.
    alpha
        Weight of the teacher, from 0 to 1.
    """

    def __init__(
        self, layers: Sequence[Layer], start: np.ndarray, teacher: Inference, *, temperature: float, alpha: float
    ) -> None:
        super().__init__(layers, start)
        self._teacher, self._temperature, self._alpha = teacher, temperature, alpha

    def loss_and_gradient(
        self, storage: ParameterStore, x: np.ndarray, y: np.ndarray, *, add: bool = False, key: RandomKey | None = None
    ) -> tuple[float, int]:
        """Return summed loss and number of hits; write, or add, the sum of the samples' gradients."""
        delta = self.forward(storage, x, self._tape, key)
        soft, gradient = soft_loss(delta, self._teacher.logits(x), self._temperature)
        hard, hits = _labeled_cross_entropy(delta, y)
        delta *= np.float32(1 - self._alpha)
        delta += (self._alpha * gradient).astype(np.float32)
        self.backward(storage, delta, self._tape, add=add)
        return self._alpha * soft + (1 - self._alpha) * hard, hits


def _labeled_cross_entropy(logits: np.ndarray, labels: np.ndarray) -> tuple[float, int]:
    """Return loss and hits of the rows that have labels; turn `logits` into the gradient, 0 in the other rows."""
    labeled = labels != UNLABELED
    if labeled.all():
        found: tuple[float, int] = softmax_cross_entropy(logits, labels)
        return found
    chosen = logits[labeled]
    loss, hits = softmax_cross_entropy(chosen, labels[labeled])
    logits[...] = 0
    logits[labeled] = chosen
    return loss, hits
