"""Quantisation, selection, channels, factors and losses against independent computations."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll import Intracomm
from mpicoll.data.datasets import load
from mpicoll.data.sample_subsets import UNLABELED
from mpicoll.deploy.deploy_commands import with_labels
from mpicoll.deploy.deploy_options import parse_deploy
from mpicoll.deploy.deployed_model import ActivationCode, DeployedLayer, DeployedModel
from mpicoll.deploy.distillation import DistilledModel, soft_loss
from mpicoll.deploy.fake_quantization import QuantisedLayer, fake_activation, fake_weight
from mpicoll.deploy.inference import Runtime
from mpicoll.deploy.low_rank import factorise
from mpicoll.deploy.magnitude_selection import largest
from mpicoll.deploy.pruning import ChannelPruning, GradualPruning, WeightPruning, prune_now, without_channels
from mpicoll.deploy.quantization import activation_code, quantised_layer, weight_scales
from mpicoll.errors import UsageError
from mpicoll.models.layers import Dense, Workspace
from mpicoll.models.sequential import FlatParameters
from mpicoll.train.config import TrainConfig

SELF = Intracomm(MPI.COMM_SELF)
RANDOM = np.random.default_rng(11)


def layer(inputs: int, outputs: int, *, relu: bool = False, seed: int = 0) -> DeployedLayer:
    random = np.random.default_rng((inputs, outputs, seed))
    weight = random.standard_normal((inputs, outputs)).astype(np.float32) / np.sqrt(inputs)
    return DeployedLayer(weight.astype(np.float32), random.standard_normal(outputs).astype(np.float32), relu)


def convolutional() -> DeployedModel:
    random = np.random.default_rng(2)
    filters = DeployedLayer(
        random.standard_normal((9, 4)).astype(np.float32), random.standard_normal(4).astype(np.float32), True, (6, 4, 1)
    )
    return DeployedModel((filters, layer(24, 5, relu=True), layer(5, 3)))


# ---- quantisation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [8, 4])
def test_weights_are_within_half_a_step(bits: int) -> None:
    weight = RANDOM.standard_normal((30, 7)).astype(np.float32) * np.logspace(-6, 6, 7, dtype=np.float32)
    weight[:, 3] = 0
    made = quantised_layer(DeployedLayer(weight, np.zeros(7, np.float32), False), bits, None)
    top = 127 if bits == 8 else 7
    assert np.abs(made.weight).max() <= top
    scales = weight_scales(weight, bits)
    inside = np.abs(weight) <= scales * top
    error = np.abs(made.real_weight - weight)
    assert (error <= scales * 0.5001)[inside].all()
    assert (error[:, 3] == 0).all()
    if bits == 8:
        assert inside[:, [0, 1, 2, 4, 5, 6]].mean() > 0.99
        assert (np.abs(made.weight).max(axis=0)[[0, 6]] == 127).all()


def test_int4_clips_where_that_lowers_the_error() -> None:
    weight = np.concatenate([np.full(200, 0.55), [1.0]]).astype(np.float32)[:, None] * np.float32(0.9)
    plain = np.float32(0.9 / 7)
    scale = weight_scales(weight, 4)
    codes = np.clip(np.rint(weight / scale), -7, 7)
    assert np.square(codes * scale - weight).sum() < np.square(np.rint(weight / plain) * plain - weight).sum()


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-3.0, 5.0), (2.0, 4.0), (-7.0, -1.0), (0.0, 0.0), (0, 1e-42)])
def test_ranges_hold_zero_exactly(low: float, high: float) -> None:
    scale, zero = activation_code(low, high)
    assert 0 <= zero <= 255
    assert scale > 0
    assert scale * (0 - zero) <= min(low, 0) + 0.51 * scale
    assert scale * (255 - zero) >= max(high, 0) - 0.51 * scale


@pytest.mark.parametrize("rows", [1, 4, 7])
@pytest.mark.parametrize("kind", ["dense", "convolution"])
def test_integer_inference_is_that_of_the_codes(rows: int, kind: str) -> None:
    """The same computation in float64 with the numbers that the codes mean."""
    model = convolutional() if kind == "convolution" else DeployedModel((layer(9, 13, relu=True), layer(13, 3)))
    codes = [activation_code(-4, 4), activation_code(0, 15), activation_code(0, 12)][: len(model.layers)]
    integer = DeployedModel(tuple(map(quantised_layer, model.layers, [8] * 3, codes)))
    x = np.random.default_rng(rows).standard_normal((rows, model.input_count)).astype(np.float32)
    y = x.astype(np.float64)
    for each in integer.layers:
        y = reference(each, y)
    found = Runtime(integer).logits(x)
    scale = codes[-1].scale  # a code of a hidden layer may be rounded to its neighbour
    np.testing.assert_allclose(found, y, atol=2 * scale * np.abs(integer.layers[-1].real_weight).max())
    assert np.abs(found - y).mean() < 0.1 * scale
    real = Runtime(model).logits(x)
    assert np.abs(found - real).max() < 0.1 * np.abs(real).max()


@pytest.mark.parametrize("activations", [True, False])
@pytest.mark.parametrize("kind", ["dense", "convolution"])
def test_inference_of_no_samples_gives_no_logits(kind: str, activations: bool) -> None:
    """A rank has none where a batch has fewer samples than there are ranks."""
    model = convolutional() if kind == "convolution" else DeployedModel((layer(9, 13, relu=True), layer(13, 3)))
    if activations:
        model = DeployedModel(tuple(quantised_layer(each, 8, activation_code(-4, 4)) for each in model.layers))
    found = Runtime(model).logits(np.empty((0, model.input_count), np.float32))
    assert (found.shape, found.dtype) == ((0, model.class_count), np.float32)


def reference(each: DeployedLayer, x: np.ndarray) -> np.ndarray:
    assert each.activation is not None
    scale, zero = each.activation
    rounded = (np.clip(np.rint(x / scale) + zero, 0, 255) - zero) * scale
    weight = each.real_weight.astype(np.float64)
    if each.image is None:
        out = rounded @ weight + each.bias
        return np.maximum(out, 0) if each.relu else out
    rows, (height, width, channels), filters = len(x), each.image, weight.shape[1]
    padded = np.pad(rounded.reshape(rows, height, width, channels), ((0, 0), (1, 1), (1, 1), (0, 0)))
    maps = np.zeros((rows, height, width, filters))
    for i in range(3):
        for j in range(3):
            part = weight.reshape(3, 3, channels, filters)[i, j]
            maps += padded[:, i : i + height, j : j + width] @ part
    maps = np.maximum(maps + each.bias, 0)
    pooled = maps.reshape(rows, height // 2, 2, width // 2, 2, filters).max(axis=(2, 4))
    return pooled.reshape(rows, -1)


def test_a_bias_far_above_its_weights_survives() -> None:
    weight = np.full((3, 2), 1e-9, np.float32)
    plain = DeployedLayer(weight, np.array([5.0, -7.0], np.float32), False)
    made = quantised_layer(plain, 8, ActivationCode(0.01, 128))
    found = Runtime(DeployedModel((made,))).logits(np.zeros((2, 3), np.float32))
    np.testing.assert_allclose(found, [[5, -7], [5, -7]], rtol=1e-5)


# ---- selection ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 2, 50, 99, 100])
def test_the_largest_are_chosen_and_of_equals_the_first(count: int) -> None:
    values = np.abs(np.random.default_rng(count).standard_normal(100)).astype(np.float32)
    values[10:60] = values[10]
    values[70:75] = -0.0
    mask = largest(values, count, SELF)
    order = np.argsort(-values, kind="stable")
    assert np.flatnonzero(mask).tolist() == sorted(order[:count].tolist())


@pytest.mark.parametrize("count", [-1, 4])
def test_impossible_numbers_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match=r"count: .* of 3 elements"):
        largest(np.ones(3, np.float32), count, SELF)


@pytest.mark.parametrize("whole", [True, False])
def test_weights_are_pruned_to_the_sparsity(whole: bool) -> None:
    model = DeployedModel((layer(20, 30, relu=True), layer(30, 10)))
    made = prune_now(WeightPruning(whole, SELF), model, 0.9, "pruned")
    kept = [each.nonzero_count for each in made.layers]
    assert sum(kept) == 90
    assert (kept == [60, 30]) is not whole
    smallest = min(np.abs(each.weight[each.weight != 0]).min() for each in made.layers)
    pairs = zip(model.layers, made.layers, strict=True)
    removed = max(np.abs(one.weight[other.weight == 0]).max() for one, other in pairs)
    assert (removed <= smallest) or not whole


@pytest.mark.parametrize("whole", [True, False])
def test_smaller_matrices_compute_what_the_masked_ones_do(whole: bool) -> None:
    model, pruning = convolutional(), ChannelPruning(whole, SELF)
    masked = prune_now(pruning, model, 0.5, "pruned")
    small = without_channels(masked, pruning.masks)
    hidden = [each.weight.shape[1] for each in small.layers[:-1]]
    assert sum(hidden) in (4, 5)
    assert min(hidden) >= 1
    assert small.layers[1].input_count == small.layers[0].output_count
    assert small.operations[0] < 0.7 * model.operations[0]
    x = np.random.default_rng(0).standard_normal((8, 24)).astype(np.float32)
    np.testing.assert_allclose(Runtime(small).logits(x), Runtime(masked).logits(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sparsity", [0.5, 0.9, 0.999])
def test_every_layer_keeps_a_channel(sparsity: float) -> None:
    """Also where fewer units are wanted than there are layers."""
    widths = (6, 4, 4, 4, 3)
    model = DeployedModel(tuple(layer(*each, relu=True) for each in itertools.pairwise(widths)))
    pruning = ChannelPruning(True, SELF)
    small = without_channels(prune_now(pruning, model, sparsity, "pruned"), pruning.masks)
    hidden = [each.weight.shape[1] for each in small.layers[:-1]]
    assert min(hidden) >= 1
    assert sum(hidden) == max(3, 12 - round(12 * sparsity))


def test_the_sparsity_rises_as_a_cubic() -> None:
    gradual = GradualPruning(WeightPruning(True, SELF), 0.8, "cubic", layer_count=1, total_steps=100)
    assert gradual.sparsity_after(0) == 0
    assert gradual.sparsity_after(30) == pytest.approx(0.8 * (1 - 0.5**3))
    assert gradual.sparsity_after(60) == gradual.sparsity_after(100) == pytest.approx(0.8)
    constant = GradualPruning(WeightPruning(True, SELF), 0.8, "constant", layer_count=1, total_steps=9)
    assert constant.sparsity_after(1) == 0.8


# ---- factors --------------------------------------------------------------------------------------------------------


def test_factors_are_the_best_of_their_rank() -> None:
    model = DeployedModel((layer(40, 30, relu=True), layer(30, 3)))
    made = factorise(model, 4, None, SELF, "factors")
    assert [each.weight.shape for each in made.layers] == [(40, 4), (4, 30), (30, 3)]
    assert [each.relu for each in made.layers] == [False, True, False]
    values = np.linalg.svd(model.layers[0].weight, compute_uv=False)
    product = made.layers[0].weight @ made.layers[1].weight
    error = np.linalg.norm(product - model.layers[0].weight)
    assert error == pytest.approx(np.sqrt(np.square(values[4:]).sum()), rel=1e-3)


def test_energy_takes_the_smallest_rank_that_keeps_it() -> None:
    left, right = np.linalg.qr(RANDOM.standard_normal((40, 30)))[0], np.linalg.qr(RANDOM.standard_normal((30, 30)))[0]
    values = np.array([3.0, 2.0, 1.0, *[1e-4] * 27])
    weight = ((left * values) @ right).astype(np.float32)
    model = DeployedModel((DeployedLayer(weight, np.zeros(30, np.float32), True), layer(30, 3)))
    for energy, rank in ((0.6, 1), (13 / 14 - 0.01, 2), (13 / 14 + 0.01, 3)):
        assert factorise(model, None, energy, SELF, "").layers[0].weight.shape[1] == rank
    with pytest.raises(UsageError, match="no layer has fewer weights"):
        factorise(model, None, 1.0, SELF, "")


# ---- gradients ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_gradient_of_the_soft_loss(temperature: float) -> None:
    logits, teacher = RANDOM.standard_normal((4, 6)) * 3, RANDOM.standard_normal((4, 6)) * 3
    _, gradient = soft_loss(logits, teacher, temperature)
    for place in np.ndindex(logits.shape):
        change = np.zeros_like(logits)
        change[place] = 1e-5
        above, below = (soft_loss(logits + sign * change, teacher, temperature)[0] for sign in (1, -1))
        assert gradient[place] == pytest.approx((above - below) / 2e-5, rel=1e-5, abs=1e-7)
    assert soft_loss(teacher, teacher, temperature)[0] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("unlabeled", [(), (1, 4), range(6)])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_gradient_of_a_distilled_model(alpha: float, unlabeled: Sequence[int]) -> None:
    teacher = Runtime(DeployedModel((layer(5, 4),)))
    random = np.random.default_rng(1)
    start = random.standard_normal(5 * 7 + 7 + 7 * 4 + 4).astype(np.float32)
    layers = [Dense(5, 7, relu=True), Dense(7, 4, relu=False)]
    model = DistilledModel(layers, start, teacher, temperature=3.0, alpha=alpha)
    flat, x, y = model.initial(0), random.standard_normal((6, 5)).astype(np.float32), np.arange(6) % 4
    y[list(unlabeled)] = UNLABELED
    gradient = np.zeros_like(flat)
    model.loss_and_gradient(FlatParameters(model.layout, flat, gradient), x, y)
    direction = random.standard_normal(flat.size).astype(np.float32)

    def loss(step: float) -> float:
        moved = (flat + np.float32(step) * direction).astype(np.float32)
        return model.loss_and_gradient(FlatParameters(model.layout, moved, np.zeros_like(flat)), x, y)[0]

    assert float(gradient @ direction) == pytest.approx((loss(1e-3) - loss(-1e-3)) / 2e-3, rel=5e-3)
    assert (model.loss_and_gradient(FlatParameters(model.layout, flat, gradient), x[:0], y[:0])) == (0, 0)
    labeled = np.setdiff1d(np.arange(6), list(unlabeled))
    whole, part = (model.loss_and_gradient(FlatParameters(model.layout, flat, gradient), x[rows], y[rows])
                   for rows in (np.arange(6), labeled))  # fmt: skip
    assert whole[1] == part[1]  # hits are counted where there is a label


@pytest.mark.parametrize("alpha", ["0", "0.5"])
def test_as_many_labels_as_are_wanted(alpha: str) -> None:
    data = {"dataset": "synthetic:400x6x3", "test_fraction": 0.25, "seed": 4}
    dataset = load(TrainConfig(**data), SELF)
    words = ["distill", "--teacher", "x", "--hidden", "3", "-o", "y.safetensors", "--labeled"]
    options, more = (replace(parse_deploy([*words, count, "--alpha", alpha]), data=data) for count in ("50", "301"))
    model = DeployedModel((layer(6, 3),))
    x, y = dataset.train.batch(np.arange(300))
    x, y = x.copy(), y.copy()
    found = with_labels(dataset, model, options).train
    seen, labels = found.batch(np.arange(found.count))
    if alpha == "0":
        assert found.count == 50
        known = {row.tobytes(): label for row, label in zip(x, y, strict=True)}
        assert [known[row.tobytes()] for row in seen] == labels.tolist()
    else:
        assert np.array_equal(seen, x)
        assert np.count_nonzero(labels != UNLABELED) == 50
        assert np.array_equal(labels[labels != UNLABELED], y[labels != UNLABELED])
        again = found.another()
        assert np.array_equal(again.batch(np.array([7, 3]))[1], labels[[7, 3]])
    with pytest.raises(UsageError, match="--labeled 301: there are 300 training samples"):
        with_labels(dataset, model, more)


def test_straight_through_gradients_are_those_at_the_quantised_point() -> None:
    """Finite differences of the layer without quantisation, at the quantised weights and inputs."""
    inner, code = Dense(6, 4, relu=True), ActivationCode(0.05, 100)
    made, plain = QuantisedLayer(inner, 8, code), Dense(6, 4, relu=True)
    random = np.random.default_rng(4)
    x = random.standard_normal((5, 6)).astype(np.float32) * 4
    arrays = [random.standard_normal((6, 4)).astype(np.float32), random.standard_normal(4).astype(np.float32)]
    delta = random.standard_normal((5, 4)).astype(np.float32)
    gradients, room = [np.zeros((6, 4), np.float32), np.zeros(4, np.float32)], Workspace()
    made.forward(arrays, x, room)
    into = made.backward(arrays, delta.copy(), room, gradients, below=True, add=False)
    assert into is not None
    fake = fake_activation(x, code, np.empty_like(x)).astype(np.float64)
    weight, bias = fake_weight(arrays[0], 8).astype(np.float64), arrays[1].astype(np.float64)

    def value(weight: np.ndarray, x: np.ndarray) -> float:
        return float((plain.forward([weight, bias], x, Workspace()) * delta).sum())

    for place in np.ndindex(weight.shape):
        change = np.zeros_like(weight)
        change[place] = 1e-6
        numeric = (value(weight + change, fake) - value(weight - change, fake)) / 2e-6
        assert gradients[0][place] == pytest.approx(numeric, rel=1e-3, abs=1e-4)
    low, high = -100 * code.scale, 155 * code.scale
    for place in np.ndindex(x.shape):
        change = np.zeros_like(fake)
        change[place] = 1e-6
        numeric = (value(weight, fake + change) - value(weight, fake - change)) / 2e-6
        expected = numeric if low <= x[place] <= high else 0.0
        assert into[place] == pytest.approx(expected, rel=1e-3, abs=1e-4)
    assert (x > high).any() or (x < low).any()


def test_fake_values_are_those_of_integer_inference() -> None:
    model, code = layer(9, 5), ActivationCode(0.03, 120)
    x = np.random.default_rng(8).standard_normal((7, 9)).astype(np.float32)
    room = Workspace()
    fake = QuantisedLayer(model.trainable(), 8, code).forward([model.weight, model.bias], x, room)
    found = Runtime(DeployedModel((quantised_layer(model, 8, code),))).logits(x)
    np.testing.assert_allclose(found, fake, atol=1e-4)
