"""Files of deployed models: safetensors with a description of the layers in the header.

The header's metadata hold ``format``, ``version`` and ``model``, a JSON table of layers, data set and history. Tensors
are named by layer: ``0.bias``, ``0.scales``, and ``0.weight`` or ``0.mask`` and ``0.values`` (see
:mod:`~mpicoll.deploy.weight_encoding`). Everything is checked when a file is read, before memory is taken for it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpicoll.checkpoint import tensor_file
from mpicoll.checkpoint.tensor_file import Entry
from mpicoll.deploy.deployed_model import BITS, ActivationCode, DeployedModel, LayerForm, ModelProperties
from mpicoll.deploy.layer_sources import ModelSource, OpenFile
from mpicoll.deploy.weight_encoding import BITMASK, ENCODINGS, STORED_TYPES, decode, encode, smallest
from mpicoll.errors import CheckpointFailed
from mpicoll.kernels.quantized_layers import MAX_INPUTS

FORMAT, VERSION = "mpicoll.deploy", "1"
_MAX_LAYERS, _MAX_EXTENT, _MAX_WEIGHTS = 1000, 1 << 30, 1 << 34
_DATA = {"dataset": str, "labels": (str, type(None)), "target": list, "test_fraction": float, "seed": int}
_LAYER = {"kind", "relu", "shape", "image", "bits", "encoding", "activation"}


def stored(model: DeployedModel) -> tuple[dict[str, np.ndarray], list[dict[str, Any]]]:
    """Return the tensors of a model's file by name, and the description of its layers."""
    arrays: dict[str, np.ndarray] = {}
    described = []
    for number, layer in enumerate(model.layers):
        encoding, parts = encode(layer.weight, layer.bits)
        parts["bias"] = np.ascontiguousarray(layer.bias)
        if layer.scales is not None:
            parts["scales"] = np.ascontiguousarray(layer.scales)
        arrays |= {f"{number}.{name}": array for name, array in parts.items()}
        described.append(
            {
                "kind": "dense" if layer.image is None else "conv",
                "relu": layer.relu,
                "shape": list(layer.weight.shape),
                "image": layer.image,
                "bits": layer.bits,
                "encoding": encoding,
                "activation": layer.activation,
            }
        )
    return arrays, described


def stored_nbytes(model: ModelProperties) -> int:
    """Return the bytes of the tensors of a model's file."""
    return sum(
        smallest(form.weight_count, nonzero, form.bits)[1] + 4 * form.shape[1] * (1 + form.has_codes)
        for form, nonzero in zip(model.forms, model.nonzero_counts, strict=True)
    )


def write_model(path: Path, model: DeployedModel) -> int:
    """Write a model to a file, and return the file's length in bytes; a file of that name is replaced at the end.

    Raises
    ------
    CheckpointFailed
        If the file cannot be written.
    """
    arrays, described = stored(model)
    data = dict(model.data)
    if not data.get("target"):
        data.pop("target", None)  # so that versions that know of no target read the file
    text = json.dumps({"layers": described, "data": data, "history": model.history}, separators=(",", ":"))
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        nbytes, _ = tensor_file.write(temporary, arrays, {"format": FORMAT, "version": VERSION, "model": text})
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise CheckpointFailed(f"{path}: cannot be written: {error.strerror}") from None
    return nbytes


def described_model(file: OpenFile) -> ModelSource:
    """Return the model that a file describes; its parameters are not read yet.

    Raises
    ------
    CheckpointFailed
        If the description is wrong, or does not fit the tensors.
    """
    path, metadata = file.path, file.metadata
    if metadata.get("version") != VERSION:
        raise CheckpointFailed(f"{path}: version {metadata.get('version')!r:.40} of the format, not {VERSION}")
    with _refusing(path):
        return _described(json.loads(metadata.get("model", "")), file)


@contextlib.contextmanager
def _refusing(path: Path) -> Iterator[None]:
    """Raise CheckpointFailed, with the name of the file, for what the body finds to be wrong."""
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = f"{'' if isinstance(error, ValueError) else type(error).__name__ + ' '}{error}"
        raise CheckpointFailed(f"{path}: wrong model: {' '.join(reason.split())[:200]}") from None


def _described(said: Any, file: OpenFile) -> ModelSource:
    if not isinstance(said, dict) or set(said) != {"layers", "data", "history"}:
        raise ValueError("the description has other entries than layers, data and history")
    layers, history = said["layers"], said["history"]
    if not isinstance(layers, list) or not 1 <= len(layers) <= _MAX_LAYERS:
        raise ValueError(f"layers are no list of 1 to {_MAX_LAYERS}")
    if not isinstance(history, list) or not all(isinstance(step, str) for step in history):
        raise ValueError("history is no list of texts")
    left = dict(file.entries)
    made = tuple(_layer(number, layer, left, file) for number, layer in enumerate(layers))
    if left:
        raise ValueError(f"tensor {min(left)!r:.80} belongs to no layer")
    _check_chain([layer.form for layer in made])
    return ModelSource(str(file.path), made, _data(said["data"]), tuple(history))


class _StoredLayer:
    """Layer of a file; a :class:`~mpicoll.deploy.layer_sources.LayerSource`.

    Parameters
    ----------
    number
        Number of the layer, for messages.
    entries
        Its tensors by the last part of their names, of the lengths that `form` asks for.
    """

    def __init__(self, number: int, form: LayerForm, encoding: str, entries: dict[str, Entry], file: OpenFile) -> None:
        self.form, self._name, self._encoding = form, f"layer {number}", encoding
        self._entries, self._file = entries, file

    def size(self, name: str) -> int:
        """See :class:`~mpicoll.deploy.weight_encoding.Stored`."""
        return math.prod(self._entries[name].shape)

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """See :class:`~mpicoll.deploy.weight_encoding.Stored`."""
        return self._file.read(self._entries[name], start, stop)

    def weights(self, start: int, stop: int) -> np.ndarray:
        """See :class:`~mpicoll.deploy.layer_sources.LayerSource`."""
        form = self.form
        with _refusing(self._file.path):
            weights = decode(self._encoding, self, form.weight_count, form.bits, start, stop)
            if not np.isfinite(weights).all():
                raise ValueError(f"{self._name}: weights or biases are not finite")
            if form.has_codes and weights.min(initial=0) < -BITS[form.bits]:
                raise ValueError(f"{self._name}: a code is below -{BITS[form.bits]}")
        return weights

    def bias(self) -> np.ndarray:
        """See :class:`~mpicoll.deploy.layer_sources.LayerSource`."""
        bias = self._file.read(self._entries["bias"])
        if not np.isfinite(bias).all():
            raise CheckpointFailed(f"{self._file.path}: wrong model: {self._name}: weights or biases are not finite")
        return bias

    def scales(self) -> np.ndarray | None:
        """See :class:`~mpicoll.deploy.layer_sources.LayerSource`."""
        if not self.form.has_codes:
            return None
        scales = self._file.read(self._entries["scales"])
        if not (np.isfinite(scales).all() and (scales > 0).all()):
            raise CheckpointFailed(f"{self._file.path}: wrong model: {self._name}: scales are not finite and above 0")
        return scales


def _data(said: Any) -> dict[str, Any]:
    """Return the data set of a description; one without a target has its labels in the last column, if in any."""
    if said == {}:
        return {}
    if not isinstance(said, dict) or set(said) | {"target"} != set(_DATA):
        raise ValueError("data has other entries than dataset, labels, target, test_fraction and seed")
    for name, value in said.items():
        if not isinstance(value, _DATA[name]):  # type: ignore[arg-type]
            raise ValueError(f"data: {name} is {value!r:.40}")
    if not (0 <= said["test_fraction"] < 1 and 0 <= said["seed"] < 1 << 63):
        raise ValueError("data: test_fraction or seed is out of range")
    target = said.get("target", [])
    if not all(isinstance(name, str) for name in target):
        raise ValueError(f"data: target is {target!r:.40}")
    return {**said, "target": tuple(target)}


def _layer(number: int, said: Any, entries: dict[str, Entry], file: OpenFile) -> _StoredLayer:
    """Return a layer; takes its tensors out of `entries`."""
    name = f"layer {number}"
    if not isinstance(said, dict) or set(said) != _LAYER:
        raise ValueError(f"{name} has other entries than {', '.join(sorted(_LAYER))}")
    bits, shape, image, relu = said["bits"], said["shape"], said["image"], said["relu"]
    if type(relu) is not bool or bits not in STORED_TYPES or said["encoding"] not in ENCODINGS:
        raise ValueError(f"{name}: relu, bits or encoding is wrong")
    if not _are_extents(shape, 2) or shape[0] * shape[1] > _MAX_WEIGHTS:
        raise ValueError(f"{name}: shape is {shape!r:.60}")
    if said["kind"] != ("dense" if image is None else "conv"):
        raise ValueError(f"{name}: kind is {said['kind']!r:.40}")
    if image is not None:
        _check_image(name, image, shape, relu)
    activation = _activation(name, said["activation"], bits, shape[0])
    form = LayerForm((shape[0], shape[1]), relu, image and tuple(image), bits, activation)
    lengths = _lengths(form, said["encoding"])
    taken = {part: _taken(entries, f"{number}.{part}", *wanted) for part, wanted in lengths.items()}
    return _StoredLayer(number, form, said["encoding"], taken, file)


def _lengths(form: LayerForm, encoding: str) -> dict[str, tuple[str, int | None]]:
    """Return dtype and length of each tensor of a layer; None for a length that other tensors determine."""
    weights: dict[str, tuple[str, int | None]] = {"weight": (STORED_TYPES[form.bits], None)}
    if encoding == BITMASK:
        weights = {"mask": ("uint8", -(-form.weight_count // 8)), "values": (STORED_TYPES[form.bits], None)}
    scales = {"scales": ("float32", form.shape[1])} if form.has_codes else {}
    return {**weights, "bias": ("float32", form.shape[1]), **scales}


def _are_extents(value: Any, count: int) -> bool:
    is_list = isinstance(value, list) and len(value) == count
    return is_list and all(type(extent) is int and 1 <= extent <= _MAX_EXTENT for extent in value)


def _check_image(name: str, image: Any, shape: list[int], relu: bool) -> None:
    if not _are_extents(image, 3) or min(image[:2]) < 2 or 9 * image[2] != shape[0] or not relu:
        raise ValueError(f"{name}: image {image!r:.60} does not fit a convolution of shape {shape}")
    if math.prod(image) * shape[1] > _MAX_WEIGHTS:
        raise ValueError(f"{name}: image {image!r:.60} is too large")


def _taken(entries: dict[str, Entry], name: str, dtype: str, count: int | None) -> Entry:
    """Return a vector of `entries`, and remove it there; `count` None for any length."""
    entry = entries.pop(name, None)
    if entry is None:
        raise ValueError(f"tensor {name!r} is missing")
    if entry.dtype != dtype or len(entry.shape) != 1 or (count is not None and entry.shape[0] != count):
        wanted = "a vector" if count is None else f"{count} elements"
        raise ValueError(f"tensor {name!r} has dtype {entry.dtype} and shape {entry.shape}, not {dtype} and {wanted}")
    return entry


def _activation(name: str, said: Any, bits: int, inputs: int) -> ActivationCode | None:
    if said is None:
        return None
    if not isinstance(said, list) or len(said) != 2 or type(said[1]) is not int or not 0 <= said[1] <= 255:
        raise ValueError(f"{name}: activation is {said!r:.60}")
    scale = said[0]
    if type(scale) is not float or not 0 < scale < float("inf") or not 0 < np.float32(scale) < np.inf:
        raise ValueError(f"{name}: activation is {said!r:.60}")
    if bits == 32 or inputs > MAX_INPUTS:
        raise ValueError(f"{name}: integer activations need integer weights and at most {MAX_INPUTS} inputs")
    return ActivationCode(scale, said[1])


def _check_chain(forms: Sequence[LayerForm]) -> None:
    """Refuse layers that do not fit each other."""
    for number, (before, after) in enumerate(itertools.pairwise(forms), 1):
        if after.image is not None:
            raise ValueError(f"layer {number}: a convolution is the first layer of a model")
        if before.output_count != after.input_count:
            raise ValueError(f"layer {number}: takes {after.input_count} features, gets {before.output_count}")
