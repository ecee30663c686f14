"""ONNX files against onnxruntime, and the page of a report."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest

from mpicoll.deploy.deployed_model import ActivationCode, DeployedLayer, DeployedModel
from mpicoll.deploy.evaluation import Evaluation
from mpicoll.deploy.inference import Runtime
from mpicoll.deploy.onnx_export import compare, onnx_model, write_onnx
from mpicoll.deploy.quantization import activation_code, quantised_layer
from mpicoll.deploy.tradeoff_report import write_page
from mpicoll.errors import CheckpointFailed


def layer(inputs: int, outputs: int, *, relu: bool = False, image: tuple[int, int, int] | None = None) -> DeployedLayer:
    random = np.random.default_rng((inputs, outputs))
    weight = (random.standard_normal((inputs, outputs)) / np.sqrt(inputs)).astype(np.float32)
    return DeployedLayer(weight, random.standard_normal(outputs).astype(np.float32), relu, image)


DENSE = (layer(20, 33, relu=True), layer(33, 16, relu=True), layer(16, 5))
CONVOLUTION = (layer(18, 6, relu=True, image=(7, 6, 2)), layer(54, 5))
CODES = [activation_code(-4, 4), activation_code(0, 8), activation_code(0, 8)]


def quantised(layers: tuple[DeployedLayer, ...], bits: int, *, integer: bool) -> DeployedModel:
    codes = CODES if integer else [None] * 3
    return DeployedModel(tuple(quantised_layer(each, bits, code) for each, code in zip(layers, codes, strict=False)))


MODELS = {
    "float": DeployedModel(DENSE),
    "float convolution": DeployedModel(CONVOLUTION),
    "int8": quantised(DENSE, 8, integer=True),
    "int8 convolution": quantised(CONVOLUTION, 8, integer=True),
    "int8 weights": quantised(DENSE, 8, integer=False),
    "int4": quantised(DENSE, 4, integer=True),
}


@pytest.mark.parametrize("name", MODELS)
def test_onnxruntime_gives_the_same_outputs(name: str, tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    model, path = MODELS[name], tmp_path / "m.onnx"
    x = np.random.default_rng(3).standard_normal((300, model.input_count)).astype(np.float32)
    assert write_onnx(path, model) == path.stat().st_size
    found = compare(path, model, x)
    assert found is not None
    assert found.samples == 300
    assert found.steps <= 1
    assert found.difference <= found.allowed or found.steps == 1
    assert found.same_classes >= (0.98 if model.is_quantised else 1)
    if "float" in name or name == "int8 weights":
        assert found.difference < 1e-5
    bias = model.layers[-1].bias + np.float32(0.1) * np.eye(5, dtype=np.float32)[2]
    other = DeployedModel((*model.layers[:-1], dataclasses.replace(model.layers[-1], bias=bias)))
    with pytest.raises(CheckpointFailed, match=r"m\.onnx: onnxruntime's outputs differ by"):
        compare(path, other, x)


@pytest.mark.parametrize("name", ["int8", "int8 convolution"])
def test_a_wrong_scale_is_found_at_its_layer(name: str, tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    first, *others = MODELS[name].layers
    assert first.scales is not None
    wrong = DeployedModel((dataclasses.replace(first, scales=first.scales * np.float32(1.05)), *others))
    write_onnx(tmp_path / "m.onnx", wrong)
    x = np.random.default_rng(3).standard_normal((300, first.input_count)).astype(np.float32)
    with pytest.raises(CheckpointFailed, match=r"m\.onnx: onnxruntime's codes differ by \d+ steps, more than 1"):
        compare(tmp_path / "m.onnx", MODELS[name], x)


def test_inputs_between_two_codes_are_rounded_as_onnxruntime_rounds_them(tmp_path: Path) -> None:
    """A product with one over the scale is another number than the quotient."""
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    scale, last = np.float32(0.027232974767684937), layer(1, 2)
    x = (np.arange(-100, 100, dtype=np.float32) + np.float32(0.5)) * scale
    near = np.concatenate([x, np.nextafter(x, np.float32(9)), np.nextafter(x, np.float32(-9))])[:, None]
    model = DeployedModel((quantised_layer(last, 8, ActivationCode(float(scale), 128)),))
    wanted = np.clip(np.rint(near / scale) + 128, 0, 255)
    assert np.count_nonzero(np.rint(near * (1 / scale)) != np.rint(near / scale))
    np.testing.assert_array_equal(Runtime(model).codes(0, near), wanted)
    write_onnx(tmp_path / "m.onnx", model)
    found = compare(tmp_path / "m.onnx", model, near)
    assert found is not None
    assert found.steps == 0


def test_a_code_that_differs_by_one_does_not_count_again_in_later_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step of the first layer's input is many of the last one's."""
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    model, path = MODELS["int8"], tmp_path / "m.onnx"
    write_onnx(path, model)
    x = np.random.default_rng(3).standard_normal((300, model.input_count)).astype(np.float32)
    usual = Runtime.logits
    moved = x + np.float32(CODES[0].scale) * (np.arange(300) == 7)[:, None]
    monkeypatch.setattr(Runtime, "logits", lambda self, _: usual(self, moved))
    found = compare(path, model, x)
    assert found is not None
    assert found.difference > CODES[2].scale * np.abs(model.layers[-1].real_weight).max()


def test_quantised_layers_have_integer_operators() -> None:
    pytest.importorskip("onnx")
    kinds = [node.op_type for node in onnx_model(MODELS["int8"]).graph.node]
    assert kinds.count("QuantizeLinear") == 3
    assert kinds.count("DequantizeLinear") == 6
    stored = {tensor.name: tensor.data_type for tensor in onnx_model(MODELS["int8"]).graph.initializer}
    assert stored["0.weight.codes"] == 3  # int8


def test_a_page_is_complete_and_escapes_names(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("jinja2")
    rows = [
        Evaluation("first", 0.98, 1000, 500, 400, 1e-5, 1000.0),
        Evaluation("<b>second", 0.97, 250, 500, 400, 1e-5, 1600.0),
        Evaluation("untested", None, 250, 500, 400, 1e-5, 1600.0),
    ]
    model = DeployedModel(DENSE, history=("trained", "prune <i>"))
    write_page(str(tmp_path / "r.html"), rows, [model] * 3, "digits")
    html = (tmp_path / "r.html").read_text()
    assert "&lt;b&gt;second" in html
    assert "<b>" not in html
    assert "prune &lt;i&gt;" in html
    assert "25.0 %" in html
    assert "1.60&times;" in html
    assert not re.search(r"(src|href)=\"(?!data:)", html)
    assert "data:image/png;base64,iVBOR" in html
