"""Batch normalisation against finite differences, against PyTorch where it is installed, and in parts of a batch."""

import threading

import numpy as np
import pytest

from mpicoll.models.builders import alexnet, perceptron
from mpicoll.models.layers import BatchNorm, Dense, RandomKey, Residual, batch_norms
from mpicoll.models.layers.layer_interface import Workspace
from mpicoll.models.sequential import FlatParameters, Model
from tests.train.test_layer_gradients import slopes

SHAPES = pytest.mark.parametrize("shape", [(4,), (2, 3, 4)], ids=str)
KEY = RandomKey(1, 2, np.arange(6))


def room(key=KEY):
    made = Workspace()
    made.key = key
    return made


def example(shape, rows=6, dtype=np.float64):
    random = np.random.default_rng(3)
    x, weights = random.standard_normal((2, rows, *shape))
    arrays = [random.standard_normal(shape[-1]) + 1, random.standard_normal(shape[-1])]
    return [array.astype(dtype) for array in arrays], (3 * x + 2).astype(dtype), weights.astype(dtype)


def gradients_of(layer, arrays, x, weights, key=KEY, *, below=True):
    """Return output and gradients of ``sum(weights * layer(x))``, that of the input last."""
    place, found = room(key), [np.full(len(array), np.nan, array.dtype) for array in arrays]
    out = layer.forward(arrays, x, place).copy()
    into = layer.backward(arrays, weights.copy(), place, found, below=below, add=False)
    return out, [*found, into]


@SHAPES
@pytest.mark.parametrize("key", [KEY, None], ids=["training", "evaluation"])
def test_gradients_match_finite_differences(shape, key):
    layer, (arrays, x, weights) = BatchNorm(shape), example(shape)
    layer.running[:] = np.random.default_rng(8).uniform(0.5, 2, 8)
    kept = x.copy()
    _, found = gradients_of(layer, arrays, x, weights, key)
    np.testing.assert_array_equal(x, kept)

    def value():
        return float((weights * layer.forward(arrays, x, room(key))).sum())

    for array, gradient in zip((*arrays, x), found, strict=True):
        np.testing.assert_allclose(gradient, slopes(value, array), rtol=1e-6, atol=1e-7)


@SHAPES
def test_outputs_have_mean_0_and_variance_1_before_gain_and_bias(shape):
    layer, (_, x, _) = BatchNorm(shape, epsilon=1e-12), example(shape)
    out = layer.forward([np.ones(4), np.zeros(4)], x, room()).reshape(-1, 4)
    np.testing.assert_allclose(out.mean(axis=0), 0, atol=1e-12)
    np.testing.assert_allclose(out.var(axis=0), 1, rtol=1e-9)


@SHAPES
def test_running_averages_are_used_in_an_evaluation_only(shape):
    layer, (arrays, x, _) = BatchNorm(shape, momentum=0.25), example(shape)
    assert layer.forward(arrays, x, room(None)).shape == x.shape
    np.testing.assert_array_equal(layer.running, [0] * 4 + [1] * 4)
    layer.forward(arrays, x, room())
    flat = x.reshape(-1, 4)
    expected = np.concatenate([0.25 * flat.mean(axis=0), 0.75 + 0.25 * flat.var(axis=0, ddof=1)])
    np.testing.assert_allclose(layer.running, expected, rtol=1e-12)
    assert layer.seen == len(flat)
    factor, shift = layer.affine(arrays)
    np.testing.assert_allclose(layer.forward(arrays, x, room(None)), x * factor + shift, rtol=1e-12)
    np.testing.assert_allclose(layer.running, expected, rtol=1e-12)


def test_no_rows_change_nothing():
    layer, (arrays, x, _) = BatchNorm((4,)), example((4,))
    out, found = gradients_of(layer, arrays, x[:0], x[:0])
    assert out.shape == found[2].shape == (0, 4)
    assert all((gradient == 0).all() for gradient in found[:2])
    assert (layer.running == [0] * 4 + [1] * 4).all()
    assert layer.seen == 0
    assert np.isfinite(layer.forward(arrays, x[:1], room())).all()


def test_gradients_can_be_added_and_that_of_the_input_left_out():
    layer, (arrays, x, weights) = BatchNorm((4,)), example((4,))
    place = room()
    _, once = gradients_of(layer, arrays, x, weights)
    twice = [each.copy() for each in once[:2]]
    layer.forward(arrays, x, place)
    assert layer.backward(arrays, weights.copy(), place, twice, below=False, add=True) is None
    for one, two in zip(once, twice, strict=False):
        np.testing.assert_allclose(two, 2 * one, rtol=1e-12)


def test_float32_gives_the_float64_results_rounded():
    arrays, x, weights = example((2, 3, 4))
    x += 100  # the variance is a difference of large sums
    wide = gradients_of(BatchNorm((2, 3, 4)), arrays, x.astype(np.float32).astype(np.float64), weights)
    single = [array.astype(np.float32) for array in arrays]
    out, found = gradients_of(BatchNorm((2, 3, 4)), single, x.astype(np.float32), weights.astype(np.float32))
    for narrow, other in zip((out, *found), (wide[0], *wide[1]), strict=True):
        assert narrow.dtype == np.float32
        np.testing.assert_allclose(narrow, other, rtol=1e-3, atol=1e-4)


@SHAPES
@pytest.mark.parametrize("cuts", [(2,), (0, 5)], ids=str)
def test_parts_of_a_batch_on_ranks_give_what_one_rank_gives(shape, cuts):
    """Threads stand for ranks; one of them may have no rows."""
    arrays, x, weights = example(shape)
    whole = BatchNorm(shape)
    out, gradients = gradients_of(whole, arrays, x, weights)
    count = len(cuts) + 1
    layers, barrier = [BatchNorm(shape) for _ in range(count)], threading.Barrier(count, timeout=20)
    sums, found = [None] * count, [None] * count

    def rank(number, rows):
        def add_up(vector):
            sums[number] = vector.copy()
            barrier.wait()
            vector[:] = sum(sums)
            barrier.wait()

        layers[number].add_up = add_up
        found[number] = gradients_of(layers[number], arrays, x[rows], weights[rows])

    edges = (0, *cuts, len(x))
    threads = [
        threading.Thread(target=rank, args=(number, slice(*edges[number : number + 2]))) for number in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    np.testing.assert_allclose(np.concatenate([each[0] for each in found]), out, rtol=1e-10)
    np.testing.assert_allclose(np.concatenate([each[1][2] for each in found]), gradients[2], rtol=1e-9, atol=1e-12)
    for place in range(2):
        np.testing.assert_allclose(sum(each[1][place] for each in found), gradients[place], rtol=1e-9, atol=1e-12)
    for layer in layers:
        np.testing.assert_allclose(layer.running, whole.running, rtol=1e-12)


@pytest.mark.parametrize("training", [True, False])
def test_it_agrees_with_pytorch(training):
    torch = pytest.importorskip("torch")
    arrays, x, weights = example((2, 3, 4))
    layer, other = BatchNorm((2, 3, 4)), torch.nn.BatchNorm2d(4, dtype=torch.float64)
    with torch.no_grad():
        for parameter, array in zip(other.parameters(), arrays, strict=True):
            parameter.copy_(torch.from_numpy(array))
    other.train()
    for shift in (0.0, 1.0):  # running averages of two batches
        layer.forward(arrays, x + shift, room())
        other(torch.from_numpy(x + shift).permute(0, 3, 1, 2))
    other.train(training)
    inputs = torch.from_numpy(x).permute(0, 3, 1, 2).requires_grad_()
    result = other(inputs)
    other.zero_grad()
    (result * torch.from_numpy(weights).permute(0, 3, 1, 2)).sum().backward()
    out, found = gradients_of(layer, arrays, x, weights, KEY if training else None)
    np.testing.assert_allclose(out, result.detach().permute(0, 2, 3, 1).numpy(), rtol=1e-9, atol=1e-10)
    expected = [other.weight.grad.numpy(), other.bias.grad.numpy(), inputs.grad.permute(0, 2, 3, 1).numpy()]
    for gradient, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(gradient, wanted, rtol=1e-8, atol=1e-9)
    averages = [other.running_mean.numpy(), other.running_var.numpy()]
    np.testing.assert_allclose(layer.running, np.concatenate(averages), rtol=1e-9)


@pytest.mark.parametrize(("name", "value"), [("epsilon", 0.0), ("momentum", 0.0), ("momentum", 1.5)])
def test_settings_out_of_range_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name}: {value}"):
        BatchNorm((4,), **{name: value})


@pytest.mark.parametrize("kind", ["synchronized", "local"])
def test_builders_normalise_hidden_layers(kind):
    images = alexnet((8, 8, 1), 2, 3, "float32", dropout=0, batch_norm=kind)
    for model, count in ((perceptron((5, 4, 3, 2), "float32", batch_norm=kind), 2), (images, 5)):
        found = list(batch_norms(model.layers))
        assert len(found) == count
        assert all(layer.synchronized == (kind == "synchronized") for layer in found)
    inner = BatchNorm((4,))
    assert list(batch_norms([Dense(3, 4), Residual([Dense(4, 4), inner])])) == [inner]


def test_a_model_with_it_has_the_gradients_of_its_loss():
    model = Model(perceptron((5, 4, 3), "float64", batch_norm="local").layers, "float64")
    flat, gradient = model.initial(1), np.empty(model.parameter_count)
    random = np.random.default_rng(4)
    x, y = random.standard_normal((6, 5)), np.arange(6) % 3
    store = FlatParameters(model.layout, flat, gradient)
    model.loss_and_gradient(store, x, y, key=KEY)
    found = gradient.copy()
    np.testing.assert_allclose(
        found, slopes(lambda: model.loss_and_gradient(store, x, y, key=KEY)[0], flat), rtol=1e-5, atol=1e-8
    )
