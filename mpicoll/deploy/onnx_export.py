"""Export of deployed models to ONNX, and comparison with onnxruntime; both packages are imported here only.

Quantised layers become QuantizeLinear and DequantizeLinear around MatMul and Conv, which runtimes fuse into integer
operators. Codes of 4 bits are stored in 8, and weights that are 0 are stored.
"""

from __future__ import annotations

import importlib.util
import secrets
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpicoll.deploy.deployed_model import DeployedLayer, DeployedModel
from mpicoll.deploy.inference import Runtime
from mpicoll.errors import CheckpointFailed, UsageError

OPSET, IR_VERSION = 13, 8
"""The first opset with a scale for each channel, and a file version of that time."""
INPUT, OUTPUT = "samples", "logits"
TOLERANCE = 1e-5
"""Largest difference of float32 outputs, as a share of the largest output and at least of 1."""


class Comparison(NamedTuple):
    """Comparison of outputs with onnxruntime's.

    Attributes
    ----------
    samples
        Number of samples.
    difference
        Largest absolute difference of a logit.
    allowed
        Largest difference of logits that are computed from the same input of the last layer, or of the model if that
        has no integer activations.
    steps
        Largest difference of an activation's code, where both compute it from the same codes of the layer before; 0
        without integer activations.
    same_classes
        Share of the samples with the same most likely class.
    """

    samples: int
    difference: float
    allowed: float
    steps: int
    same_classes: float


def check_exportable() -> None:
    """Refuse an export without the package onnx.

    Raises
    ------
    UsageError
    """
    if importlib.util.find_spec("onnx") is None:
        raise UsageError('export needs onnx: pip install "mpicoll[onnx]"')


class _Graph:
    """Graph under construction: nodes follow each other, from the input on."""

    def __init__(self) -> None:
        from onnx import helper, numpy_helper

        self._helper, self._from_array = helper, numpy_helper.from_array
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.last = INPUT

    def constant(self, name: str, value: np.ndarray) -> str:
        """Add an array, and return its name."""
        self.constants.append(self._from_array(np.ascontiguousarray(value), name))
        return name

    def node(self, kind: str, inputs: list[str], name: str, **attributes: Any) -> str:
        """Add an operator, and return the name of its result."""
        self.nodes.append(self._helper.make_node(kind, inputs, [name], name=f"node.{name}", **attributes))
        return name

    def then(self, kind: str, name: str, *more: str, **attributes: Any) -> None:
        """Add an operator on the last result."""
        self.last = self.node(kind, [self.last, *more], name, **attributes)

    def reshape(self, name: str, *shape: int) -> None:
        """Add a reshape of the last result."""
        self.then("Reshape", name, self.constant(f"{name}.shape", np.array(shape, np.int64)))


def onnx_model(model: DeployedModel) -> Any:
    """Return an ``onnx.ModelProto`` that maps (rows, features) to (rows, classes), both of float32; it is checked."""
    import onnx
    from onnx import TensorProto, helper

    graph = _Graph()
    for number, layer in enumerate(model.layers):
        _add_layer(graph, number, layer)
    graph.then("Identity", OUTPUT)
    inputs = [helper.make_tensor_value_info(INPUT, TensorProto.FLOAT, ["rows", model.input_count])]
    outputs = [helper.make_tensor_value_info(OUTPUT, TensorProto.FLOAT, ["rows", model.class_count])]
    made = helper.make_model(
        helper.make_graph(graph.nodes, "mpicoll", inputs, outputs, graph.constants),
        producer_name="mpicoll",
        opset_imports=[helper.make_opsetid("", OPSET)],
    )
    made.ir_version = IR_VERSION
    onnx.checker.check_model(made, full_check=True)
    return made


def _add_layer(graph: _Graph, number: int, layer: DeployedLayer) -> None:
    name = f"{number}"
    if layer.image is not None:
        graph.reshape(f"{name}.image", -1, *layer.image)
        graph.then("Transpose", f"{name}.channels_first", perm=[0, 3, 1, 2])
    if layer.activation is not None:
        scale = graph.constant(f"{name}.input.scale", np.array(layer.activation.scale, np.float32))
        zero = graph.constant(f"{name}.input.zero", np.array(layer.activation.zero, np.uint8))
        graph.then("QuantizeLinear", _codes_name(number), scale, zero)
        graph.then("DequantizeLinear", f"{name}.input.real", scale, zero)
    bias = graph.constant(f"{name}.bias", layer.bias.astype(np.float32))
    if layer.image is None:
        graph.then("MatMul", f"{name}.product", _weight(graph, name, layer, layer.weight, axis=1))
        graph.then("Add", f"{name}.sum", bias)
    else:
        by_filter = layer.weight.reshape(3, 3, layer.image[2], -1).transpose(3, 2, 0, 1)
        weight = _weight(graph, name, layer, by_filter, axis=0)
        graph.then("Conv", f"{name}.maps", weight, bias, kernel_shape=[3, 3], pads=[1, 1, 1, 1])
    if layer.relu:
        graph.then("Relu", f"{name}.relu")
    if layer.image is not None:
        graph.then("MaxPool", f"{name}.pooled", kernel_shape=[2, 2], strides=[2, 2])
        graph.then("Transpose", f"{name}.channels_last", perm=[0, 2, 3, 1])
        graph.reshape(f"{name}.features", -1, layer.output_count)


def _weight(graph: _Graph, name: str, layer: DeployedLayer, weight: np.ndarray, *, axis: int) -> str:
    """Add a weight, and return the name of its real numbers; `axis` is that of the outputs."""
    if layer.scales is None:
        return graph.constant(f"{name}.weight", weight.astype(np.float32))
    scales = graph.constant(f"{name}.weight.scales", layer.scales)
    zeros = graph.constant(f"{name}.weight.zeros", np.zeros(layer.scales.shape, np.int8))
    codes = graph.constant(f"{name}.weight.codes", weight)
    return graph.node("DequantizeLinear", [codes, scales, zeros], f"{name}.weight", axis=axis)


def write_onnx(path: Path, model: DeployedModel) -> int:
    """Write an ONNX file, and return its length in bytes; a file of that name is replaced at the end.

    Raises
    ------
    CheckpointFailed
        If the file cannot be written.
    """
    data = onnx_model(model).SerializeToString()
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise CheckpointFailed(f"{path}: cannot be written: {error.strerror}") from None
    return len(data)


def compare(path: Path, model: DeployedModel, x: np.ndarray) -> Comparison | None:
    """Compare the outputs of an ONNX file by onnxruntime with those of :class:`Runtime`; None without onnxruntime.

    An activation of an integer layer that lies between two codes may be rounded to either, and everything after it
    differs then. So layers are compared one by one, each given the codes that onnxruntime gives to it: codes that
    follow from them may differ by one step, and logits by the rounding of float32 and of the bias.

    Parameters
    ----------
    x : (rows, features) of float32

    Raises
    ------
    CheckpointFailed
        If codes or outputs differ by more than is allowed.
    """
    if importlib.util.find_spec("onnxruntime") is None:
        return None
    runtime = Runtime(model)
    own, found = runtime.logits(x).copy(), _outputs(path.read_bytes(), [OUTPUT], x)[0]
    names = [_codes_name(number) for number, layer in enumerate(model.layers) if layer.activation is not None]
    logits, *codes = _outputs(_with_outputs(path, names), [OUTPUT, *names], x)
    steps, beyond = _layer_differences(runtime, model, x, dict(zip(names, codes, strict=True)), logits)
    beyond, allowed = float(np.max([beyond, np.abs(found - logits).max()])), allowed_difference(model, own)
    if steps > 1:
        raise CheckpointFailed(f"{path}: onnxruntime's codes differ by {steps} steps, more than 1")
    if not beyond <= allowed:
        raise CheckpointFailed(f"{path}: onnxruntime's outputs differ by {beyond:.3g}, more than {allowed:.3g}")
    same = float((found.argmax(axis=1) == own.argmax(axis=1)).mean())
    return Comparison(len(x), float(np.abs(found - own).max()), allowed, steps, same)


def _outputs(data: bytes, names: list[str], x: np.ndarray) -> list[np.ndarray]:
    """Return outputs of an ONNX file's contents by onnxruntime."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    # Without it, sums of two products of uint8 and int8 are cut at int16 on processors without VNNI.
    options.add_session_config_entry("session.x64quantprecision", "1")
    # Without it, inputs of layers whose weights alone are integers are rounded to int8.
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    outputs: list[np.ndarray] = session.run(names, {INPUT: x})
    return outputs


def _with_outputs(path: Path, names: list[str]) -> bytes:
    """Return the contents of an ONNX file that returns tensors of uint8 as well."""
    import onnx

    made = onnx.load(path)
    made.graph.output.extend(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.UINT8, None) for name in names)
    data: bytes = made.SerializeToString()
    return data


def _layer_differences(
    runtime: Runtime, model: DeployedModel, x: np.ndarray, codes: dict[str, np.ndarray], logits: np.ndarray
) -> tuple[int, float]:
    """Return the largest differences of codes, and of logits, where each layer is given onnxruntime's codes.

    Parameters
    ----------
    x
        The samples.
    codes
        Onnxruntime's codes of layers' inputs by their names in the graph; those of a convolution have channels first.
    logits
        Onnxruntime's logits.
    """
    steps = 0
    for number, layer in enumerate(model.layers):
        if layer.activation is not None:
            theirs = codes[_codes_name(number)]
            if layer.image is not None:
                theirs = np.ascontiguousarray(theirs.transpose(0, 2, 3, 1)).reshape(len(theirs), -1)
            difference = np.abs(runtime.codes(number, x).astype(np.int16) - theirs)
            steps, x = max(steps, int(difference.max(initial=0))), theirs
        x = runtime.output(number, x)
    return steps, float(np.abs(x - logits).max())


def allowed_difference(model: DeployedModel, logits: np.ndarray) -> float:
    """Return the largest difference of logits of the same input that count as the same; see :func:`compare`."""
    rounding = TOLERANCE * max(1.0, float(np.abs(logits).max()))
    last = model.layers[-1]
    if last.activation is None or last.scales is None:
        return rounding
    return rounding + last.activation.scale * float(last.scales.max()) / 2  # the bias is a whole number of these


def _codes_name(number: int) -> str:
    """Return the name of the codes of a layer's input in the graph."""
    return f"{number}.input.codes"
