"""Files of deployed models: safetensors with a description of the layers in the header.

The header's metadata hold ``format``, ``version`` and ``model``, a JSON table of layers, data set and history. Tensors
are named by layer: ``0.bias``, ``0.scales``, and ``0.weight`` or ``0.mask`` and ``0.values`` (see
:mod:`~mpicoll.deploy.weight_encoding`). Everything is checked when a file is read, before memory is taken for it.
"""

from __future__ import annotations

import json
import math
import secrets
from pathlib import Path
from typing import Any

import numpy as np

from mpicoll.checkpoint import tensor_file
from mpicoll.checkpoint.durable_files import opened
from mpicoll.checkpoint.tensor_file import Entry, dtype_of, read_annotated_header, read_range
from mpicoll.deploy.deployed_model import BITS, ActivationCode, DeployedLayer, DeployedModel
from mpicoll.deploy.weight_encoding import ENCODINGS, STORED_TYPES, decode, encode
from mpicoll.errors import CheckpointFailed
from mpicoll.kernels.quantized_layers import MAX_INPUTS

FORMAT, VERSION = "mpicoll.deploy", "1"
_MAX_LAYERS, _MAX_EXTENT, _MAX_WEIGHTS = 1000, 1 << 30, 1 << 34
_DATA = {"dataset": str, "labels": (str, type(None)), "test_fraction": float, "seed": int}
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


def stored_nbytes(model: DeployedModel) -> int:
    """Return the bytes of the tensors of a model's file."""
    return sum(array.nbytes for array in stored(model)[0].values())


def write_model(path: Path, model: DeployedModel) -> int:
    """Write a model to a file, and return the file's length in bytes; a file of that name is replaced at the end.

    Raises
    ------
    CheckpointFailed
        If the file cannot be written.
    """
    arrays, described = stored(model)
    text = json.dumps({"layers": described, "data": model.data, "history": model.history}, separators=(",", ":"))
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        nbytes, _ = tensor_file.write(temporary, arrays, {"format": FORMAT, "version": VERSION, "model": text})
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise CheckpointFailed(f"{path}: cannot be written: {error.strerror}") from None
    return nbytes


def read_tensors(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Return tensors and metadata of a safetensors file.

    Raises
    ------
    CheckpointFailed
        If the file is missing, damaged or not a plain file.
    """
    with opened(path) as descriptor:
        entries, metadata = read_annotated_header(descriptor, path)
        return {name: _read(descriptor, entry, path) for name, entry in entries.items()}, metadata or {}


def _read(descriptor: int, entry: Entry, path: Path) -> np.ndarray:
    out = np.empty(math.prod(entry.shape), dtype_of(entry.dtype))
    read_range(descriptor, entry, 0, out, path)
    return out.reshape(entry.shape)


def model_of(path: Path, arrays: dict[str, np.ndarray], metadata: dict[str, str]) -> DeployedModel:
    """Return the model that a file describes.

    Parameters
    ----------
    path
        Name of the file, for messages.
    arrays, metadata
        Contents of the file, see :func:`read_tensors`.

    Raises
    ------
    CheckpointFailed
        If the description is wrong, or does not fit the tensors.
    """
    if metadata.get("version") != VERSION:
        raise CheckpointFailed(f"{path}: version {metadata.get('version')!r:.40} of the format, not {VERSION}")
    try:
        said = json.loads(metadata.get("model", ""))
        model = _described_model(said, dict(arrays))
        _check_chain(model)
        return model
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = f"{'' if isinstance(error, ValueError) else type(error).__name__ + ' '}{error}"
        raise CheckpointFailed(f"{path}: wrong model: {' '.join(reason.split())[:200]}") from None


def _described_model(said: Any, arrays: dict[str, np.ndarray]) -> DeployedModel:
    if not isinstance(said, dict) or set(said) != {"layers", "data", "history"}:
        raise ValueError("the description has other entries than layers, data and history")
    layers, history = said["layers"], said["history"]
    if not isinstance(layers, list) or not 1 <= len(layers) <= _MAX_LAYERS:
        raise ValueError(f"layers are no list of 1 to {_MAX_LAYERS}")
    if not isinstance(history, list) or not all(isinstance(step, str) for step in history):
        raise ValueError("history is no list of texts")
    made = tuple(_layer(number, layer, arrays) for number, layer in enumerate(layers))
    if arrays:
        raise ValueError(f"tensor {min(arrays)!r:.80} belongs to no layer")
    return DeployedModel(made, _data(said["data"]), tuple(history))


def _data(said: Any) -> dict[str, Any]:
    if not isinstance(said, dict) or (said and set(said) != set(_DATA)):
        raise ValueError("data has other entries than dataset, labels, test_fraction and seed")
    for name, value in said.items():
        if not isinstance(value, _DATA[name]):  # type: ignore[arg-type]
            raise ValueError(f"data: {name} is {value!r:.40}")
    if said and not (0 <= said["test_fraction"] < 1 and 0 <= said["seed"] < 1 << 63):
        raise ValueError("data: test_fraction or seed is out of range")
    return said


def _layer(number: int, said: Any, arrays: dict[str, np.ndarray]) -> DeployedLayer:
    """Return a layer; takes its tensors out of `arrays`."""
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
    weight = _weight(number, said["encoding"], (shape[0], shape[1]), bits, arrays)
    bias = _taken(arrays, f"{number}.bias", "float32", shape[1])
    scales = None if bits == 32 else _taken(arrays, f"{number}.scales", "float32", shape[1])
    if not np.isfinite(bias).all() or not np.isfinite(weight).all():
        raise ValueError(f"{name}: weights or biases are not finite")
    if scales is not None and not (np.isfinite(scales).all() and (scales > 0).all()):
        raise ValueError(f"{name}: scales are not finite and above 0")
    if bits in BITS and weight.min() < -BITS[bits]:
        raise ValueError(f"{name}: a code is below -{BITS[bits]}")
    activation = _activation(name, said["activation"], bits, shape[0])
    return DeployedLayer(weight, bias, relu, image and tuple(image), bits, scales, activation)


def _are_extents(value: Any, count: int) -> bool:
    is_list = isinstance(value, list) and len(value) == count
    return is_list and all(type(extent) is int and 1 <= extent <= _MAX_EXTENT for extent in value)


def _check_image(name: str, image: Any, shape: list[int], relu: bool) -> None:
    if not _are_extents(image, 3) or min(image[:2]) < 2 or 9 * image[2] != shape[0] or not relu:
        raise ValueError(f"{name}: image {image!r:.60} does not fit a convolution of shape {shape}")
    if math.prod(image) * shape[1] > _MAX_WEIGHTS:
        raise ValueError(f"{name}: image {image!r:.60} is too large")


def _weight(number: int, encoding: str, shape: tuple[int, int], bits: int, arrays: dict[str, np.ndarray]) -> np.ndarray:
    if encoding == "bitmask":
        count = shape[0] * shape[1]
        parts = {
            "mask": _taken(arrays, f"{number}.mask", "uint8", -(-count // 8)),
            "values": _taken(arrays, f"{number}.values", STORED_TYPES[bits], None),
        }
    else:
        parts = {"weight": _taken(arrays, f"{number}.weight", STORED_TYPES[bits], None)}
    return decode(encoding, parts, shape, bits)


def _taken(arrays: dict[str, np.ndarray], name: str, dtype: str, count: int | None) -> np.ndarray:
    """Return a vector of `arrays`, and remove it there; `count` None for any length."""
    array = arrays.pop(name, None)
    if array is None:
        raise ValueError(f"tensor {name!r} is missing")
    if array.dtype != dtype or array.ndim != 1 or (count is not None and array.size != count):
        wanted = "a vector" if count is None else f"{count} elements"
        raise ValueError(f"tensor {name!r} has dtype {array.dtype} and shape {array.shape}, not {dtype} and {wanted}")
    return array


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


def _check_chain(model: DeployedModel) -> None:
    """Refuse layers that do not fit each other."""
    for number, (before, after) in enumerate(zip(model.layers, model.layers[1:], strict=False), 1):
        if after.image is not None:
            raise ValueError(f"layer {number}: a convolution is the first layer of a model")
        if before.output_count != after.input_count:
            raise ValueError(f"layer {number}: takes {after.input_count} features, gets {before.output_count}")
