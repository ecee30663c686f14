"""Layers in files and checkpoints: their forms, and their parameters by ranges; and models that are read as a whole."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from mpicoll.checkpoint.durable_files import fingerprint, opened
from mpicoll.checkpoint.tensor_file import Entry, dtype_of, read_annotated_header, read_range
from mpicoll.deploy.deployed_model import DeployedLayer, DeployedModel, LayerForm
from mpicoll.errors import CheckpointFailed


class LayerSource(Protocol):
    """Layer whose parameters can be read. Methods raise CheckpointFailed, with file and reason."""

    @property
    def form(self) -> LayerForm:
        """Shape and representation."""

    def weights(self, start: int, stop: int) -> np.ndarray:
        """Return weights ``start`` to ``stop - 1`` in the order of the (inputs, outputs) array.

        Returns
        -------
        (stop - start,) of float32, or of int8 if they are codes
        """

    def bias(self) -> np.ndarray:
        """Return the bias, (outputs,) of float32."""

    def scales(self) -> np.ndarray | None:
        """Return the scales of codes, (outputs,) of float32; None for real numbers."""


class ModelSource(NamedTuple):
    """Model whose layers can be read; `data` and `history` as in :class:`~mpicoll.deploy.deployed_model.DeployedModel`.

    Attributes
    ----------
    name
        File or folder, for messages.
    """

    name: str
    layers: tuple[LayerSource, ...]
    data: dict[str, Any]
    history: tuple[str, ...]

    @property
    def forms(self) -> tuple[LayerForm, ...]:
        """Shapes and representations of the layers."""
        return tuple(layer.form for layer in self.layers)

    def whole(self) -> DeployedModel:
        """Return the model with all parameters. Not collective."""
        return DeployedModel(tuple(map(_whole_layer, self.layers)), self.data, self.history)


def _whole_layer(source: LayerSource) -> DeployedLayer:
    form = source.form
    weight = source.weights(0, form.weight_count).reshape(form.shape)
    return DeployedLayer(weight, source.bias(), form.relu, form.image, form.bits, source.scales(), form.activation)


class OpenFile(NamedTuple):
    """Open safetensors file.

    Attributes
    ----------
    entries
        Descriptions of the tensors by name.
    metadata
        Texts of the header by name.
    """

    path: Path
    descriptor: int
    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]

    def read(self, entry: Entry, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return elements ``start`` to ``stop - 1`` of a tensor in C order, (stop - start,) of its dtype.

        Raises
        ------
        CheckpointFailed
            If the file cannot be read, or ends before the range does.
        """
        stop = math.prod(entry.shape) if stop is None else stop
        out = np.empty(stop - start, dtype_of(entry.dtype))
        self.fill(entry, start, out)
        return out

    def fill(self, entry: Entry, start: int, out: np.ndarray) -> None:
        """Fill the contiguous vector `out` with elements of a tensor from `start` on; see :meth:`read`."""
        try:
            read_range(self.descriptor, entry, start, out, self.path)
        except OSError as error:
            raise CheckpointFailed(f"{self.path}: cannot be read: {error.strerror}") from None

    def digest(self) -> str:
        """Return the SHA-256 of the file, which is read in blocks.

        Raises
        ------
        CheckpointFailed
            If it cannot be read.
        """
        try:
            return fingerprint(self.descriptor)[1]
        except OSError as error:
            raise CheckpointFailed(f"{self.path}: cannot be read: {error.strerror}") from None


@contextlib.contextmanager
def opened_file(path: Path) -> Iterator[OpenFile]:
    """Open a safetensors file, and check its header.

    Raises
    ------
    CheckpointFailed
        If the file is missing, damaged or not a plain file.
    """
    with opened(path) as descriptor:
        entries, metadata = read_annotated_header(descriptor, path)
        yield OpenFile(path, descriptor, entries, metadata or {})
