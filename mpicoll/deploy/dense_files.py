"""Safetensors files of other programs: dense layers with ReLU between them, named as PyTorch names them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np

from mpicoll.checkpoint.tensor_file import Entry, dtype_of
from mpicoll.deploy.deployed_model import LayerForm
from mpicoll.deploy.layer_sources import ModelSource, OpenFile
from mpicoll.errors import CheckpointFailed

_PAIR = re.compile(r"(?:(.*)\.)?(weight|bias)")


def dense_model(file: OpenFile) -> ModelSource:
    """Return the model of a file: ``NAME.weight``, (outputs, inputs), and ``NAME.bias``, (outputs,), or no bias.

    Layers follow each other in the natural order of their names. Their parameters are not read yet.

    Raises
    ------
    CheckpointFailed
        If a tensor is of another kind, or layers do not fit each other.
    """
    pairs: dict[str, dict[str, Entry]] = {}
    for name, entry in file.entries.items():
        match = _PAIR.fullmatch(name)
        if match is None or len(entry.shape) != (2 if match[2] == "weight" else 1) or math.prod(entry.shape) == 0:
            raise _wrong(file, f"tensor {name!r:.80} of shape {entry.shape} is not the weight or bias of a dense layer")
        pairs.setdefault(match[1] or "", {})[match[2]] = entry
    if not pairs:
        raise _wrong(file, "has no tensors")
    names = sorted(pairs, key=_natural)
    layers = [_DenseLayer(name, pairs[name], file, relu=name != names[-1]) for name in names]
    _check_chain(layers, file)
    return ModelSource(str(file.path), tuple(layers), {}, (f"from {file.path.name}",))


def _check_chain(layers: Sequence[_DenseLayer], file: OpenFile) -> None:
    """Refuse layers that do not fit their bias or each other."""
    outputs = None
    for layer in layers:
        inputs = layer.form.shape[0]
        if not layer.bias_fits or outputs not in (None, inputs):
            raise _wrong(file, f"layer {layer.name!r:.80} of {inputs} inputs does not fit its bias or the one before")
        outputs = layer.form.shape[1]


class _DenseLayer:
    """Dense layer of a file; a :class:`~mpicoll.deploy.layer_sources.LayerSource`."""

    def __init__(self, name: str, entries: dict[str, Entry], file: OpenFile, *, relu: bool) -> None:
        self.name, self._entries, self._file = name, entries, file
        for part in ("weight", "bias"):
            self._check_real(part)
        outputs, inputs = entries["weight"].shape
        self.form = LayerForm((inputs, outputs), relu)

    def _check_real(self, part: str) -> None:
        entry = self._entries.get(part)
        if entry is None and part == "weight":
            raise _wrong(self._file, f"tensor {self._tensor(part)} is missing")
        if entry is not None and dtype_of(entry.dtype).kind in "iub":
            raise _wrong(
                self._file, f"tensor {self._tensor(part)} has dtype {entry.dtype}, which holds no real numbers"
            )

    def _tensor(self, part: str) -> str:
        return f"{f'{self.name}.{part}'!r:.80}"

    @property
    def bias_fits(self) -> bool:
        """True if there is no bias, or it has an element for each output."""
        return "bias" not in self._entries or self._entries["bias"].shape == self.form.shape[1:]

    def weights(self, start: int, stop: int) -> np.ndarray:
        """See :class:`~mpicoll.deploy.layer_sources.LayerSource`; reads columns of the matrix in the file."""
        outputs = self.form.shape[1]
        first, last = start // outputs, -(-stop // outputs)
        found = self._real("weight", self._columns(first, last))
        return np.ascontiguousarray(found.T).reshape(-1)[start - first * outputs : stop - first * outputs]

    def _columns(self, first: int, last: int) -> np.ndarray:
        """Return columns ``first`` to ``last - 1`` of the weights, (outputs, last - first) of the file's dtype."""
        entry, (inputs, outputs) = self._entries["weight"], self.form.shape
        if last - first == inputs:
            return self._file.read(entry).reshape(entry.shape)
        columns = np.empty((outputs, last - first), dtype_of(entry.dtype))
        for number, row in enumerate(columns):
            self._file.fill(entry, number * inputs + first, row)
        return columns

    def bias(self) -> np.ndarray:
        """See :class:`~mpicoll.deploy.layer_sources.LayerSource`; zeros if the file has none."""
        if "bias" not in self._entries:
            return np.zeros(self.form.shape[1], np.float32)
        return self._real("bias", self._file.read(self._entries["bias"]))

    def scales(self) -> None:
        """Return None: weights are real numbers."""

    def _real(self, part: str, array: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            real = array.astype(np.float32, copy=False)
        if not np.isfinite(real).all():
            raise _wrong(self._file, f"tensor {self._tensor(part)} is not finite in float32")
        return real


def _natural(name: str) -> list[tuple[int, int | str]]:
    """Return a key that sorts ``fc2`` before ``fc10``."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name) if part]


def _wrong(file: OpenFile, reason: str) -> CheckpointFailed:
    return CheckpointFailed(f"{file.path}: {reason}")
