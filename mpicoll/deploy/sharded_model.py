"""Models whose parameters are divided among the ranks, and their inference, which gathers one layer after the other.

Large teachers of a distillation are held like this; see ``--shard-teacher`` of ``python -m mpicoll.deploy distill``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll.checkpoint.collective_reads import attempt
from mpicoll.consensus import wait_politely
from mpicoll.deploy.deployed_model import DeployedLayer, DeployedModel, LayerForm, ModelProperties
from mpicoll.deploy.inference import Inference, Runtime, Stage, stage_of
from mpicoll.deploy.layer_sources import LayerSource, ModelSource
from mpicoll.models.sequential import ParameterLayout
from mpicoll.parallel.parameter_groups import ParameterGroups, cut
from mpicoll.parallel.prefetch import GroupPrefetch

_WORD = np.dtype(np.float32)
"""Type in which parameters are divided and gathered; four codes take a word."""


class _LayerRecord:
    """Arrangement of a layer's parameters in words: weights, bias, scales."""

    def __init__(self, form: LayerForm) -> None:
        self.weight_words = -(-form.weight_count // 4) if form.has_codes else form.weight_count
        self.shapes: tuple[tuple[int, ...], ...] = ((self.weight_words,), *[(form.shape[1],)] * (1 + form.has_codes))
        self.decays = tuple(False for _ in self.shapes)


class _Records(NamedTuple):
    """Records of all layers as one vector, for :class:`~mpicoll.parallel.parameter_groups.ParameterGroups`."""

    layout: ParameterLayout
    dtype: np.dtype
    parameter_count: int


def _records(forms: Sequence[LayerForm]) -> _Records:
    layout = ParameterLayout([_LayerRecord(form) for form in forms])
    return _Records(layout, _WORD, layout.bounds[-1])


def whole_nbytes(forms: Sequence[LayerForm]) -> int:
    """Return the bytes of a model's parameters on a rank that holds and uses all of them."""
    real = sum(form.weight_count for form in forms if form.has_codes and form.activation is None)
    return _WORD.itemsize * (_records(forms).parameter_count + real)


def sharded_nbytes(forms: Sequence[LayerForm], size: int) -> int:
    """Return the bytes that each of `size` ranks holds of a model: its chunks, and a buffer for the largest layer."""
    blocks = [unit.block for unit in cut(_records(forms).layout.bounds, 1, size)]
    return _WORD.itemsize * (sum(blocks) + size * max(blocks))


class ShardedModel(ModelProperties):
    """Model of which each rank holds a chunk of each layer, and a buffer for one layer. Collective.

    The chunks are read from the file layer by layer, by ranges: beside them a rank's memory holds copies of the one
    that is being read, and of sparse layers a byte for each weight of the layer.

    Parameters
    ----------
    source
        The model to read.

    Raises
    ------
    CheckpointFailed
        On every rank, naming the file and the reason.
    """

    def __init__(self, source: ModelSource, comm: MPI.Intracomm) -> None:
        self.data, self.history, self._forms = source.data, source.history, source.forms
        self._comm, self._records = comm, [_LayerRecord(form) for form in source.forms]
        self._division = ParameterGroups(_records(source.forms), comm, 1)  # a unit for each layer
        self._blocks, nonzero = attempt(comm, lambda: self._read(source.layers))
        comm.Allreduce(MPI.IN_PLACE, nonzero, MPI.SUM)
        self._nonzero = tuple(nonzero.tolist())
        self._gathering = attempt(comm, lambda: GroupPrefetch(self._division, self._blocks, 1))

    def _read(self, layers: Sequence[LayerSource]) -> tuple[list[np.ndarray], np.ndarray]:
        """Return this rank's chunk of each layer, padded, and the number of weights in it that are not 0."""
        blocks, nonzero, division = [], np.zeros(len(layers), np.int64), self._division
        for number, (source, unit) in enumerate(zip(layers, division.units, strict=True)):
            block, own = division.zeros(unit.block), division.own[number]
            start, stop = own.start - unit.start, own.stop - unit.start
            nonzero[number] = _read_words(source, self._records[number].weight_words, start, block[: stop - start])
            blocks.append(block)
        return blocks, nonzero

    @property
    def forms(self) -> tuple[LayerForm, ...]:
        """Shapes and representations of the layers."""
        return self._forms

    @property
    def nonzero_counts(self) -> tuple[int, ...]:
        """Number of weights of each layer that are not 0."""
        return self._nonzero

    @property
    def nbytes(self) -> int:
        """Bytes that this rank holds: chunks, and the buffer for a layer."""
        return sum(block.nbytes for block in self._blocks) + self._gathering.nbytes

    @property
    def comm(self) -> MPI.Intracomm:
        """Communicator of the ranks that hold the model."""
        return self._comm

    def layer(self, number: int) -> DeployedLayer:
        """Return a layer, whose arrays are valid until the next call. Collective."""
        form, words = self._forms[number], self._gathering.use(number)
        weight, bias, *scales = self._division.views(number, words)
        if form.has_codes:
            weight = weight.view(np.int8)[: form.weight_count]
        return DeployedLayer(
            weight.reshape(form.shape), bias, form.relu, form.image, form.bits, scales[0] if scales else None,
            form.activation,
        )  # fmt: skip


def _read_words(source: LayerSource, weight_words: int, start: int, out: np.ndarray) -> int:
    """Fill `out` with a layer's words from `start` on; return the number of weights among them that are not 0."""
    nonzero, form, stop = 0, source.form, start + out.size
    if start < min(stop, weight_words):
        per_word = 4 if form.has_codes else 1
        last = min(per_word * stop, form.weight_count)
        weights = source.weights(per_word * start, last)
        out.view(weights.dtype)[: weights.size] = weights
        nonzero = int(np.count_nonzero(weights))
    if stop > weight_words:
        scales = source.scales()
        tail = np.concatenate([source.bias(), *([] if scales is None else [scales])])
        first = max(start, weight_words)
        out[first - start :] = tail[first - weight_words : stop - weight_words]
    return nonzero


class ShardedRuntime(Inference):
    """Inference of a sharded model: every method is collective, also for ranks without samples.

    Each call gathers every layer once, one after the other in the same buffer. The outputs have the bits of
    :class:`~mpicoll.deploy.inference.Runtime`, since the same functions compute them from the same arrays.
    """

    def __init__(self, model: ShardedModel) -> None:
        super().__init__(model.input_count)
        self._model, self._is_first = model, True

    def _layers(self) -> Iterator[Stage]:
        model, forms = self._model, self._model.forms
        following = [form.activation for form in forms[1:]]
        for number, after in enumerate([*following, None]):
            if self._is_first:  # kernels may be compiled, which takes longer than a collective may wait
                wait_politely(model.comm)
            yield stage_of(model.layer(number), after)
        self._is_first = False


def runtime_of(model: DeployedModel | ShardedModel) -> Inference:
    """Return the inference of a model, whoever holds its parameters."""
    return ShardedRuntime(model) if isinstance(model, ShardedModel) else Runtime(model)


def facts_of(model: ShardedModel) -> dict[str, Any]:
    """Return the facts of a sharded teacher for the report."""
    return {"ranks": model.comm.Get_size(), "nbytes": model.nbytes, "whole_nbytes": whole_nbytes(model.forms)}
