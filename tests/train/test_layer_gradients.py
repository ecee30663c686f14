"""Layers against finite differences in float64, and against PyTorch where it is installed."""

import math

import numpy as np
import pytest

from mpicoll.kernels import network_layers
from mpicoll.models.builders import alexnet, transformer
from mpicoll.models.layers import (
    AveragePool,
    CausalSelfAttention,
    Conv2d,
    Dense,
    Dropout,
    Gelu,
    LayerNorm,
    MaxPool,
    RandomKey,
    Relu,
    Reshape,
    Residual,
)
from mpicoll.models.layers.layer_interface import Workspace
from mpicoll.models.sequential import FlatParameters, Model
from mpicoll.models.tasks import regression

IMAGE = (5, 6, 2)
LAYERS = {
    "dense": (Dense(4, 3), (4,)),
    "dense-relu": (Dense(4, 3, relu=True), (4,)),
    "dense-without-bias": (Dense(4, 3, bias=False), (4,)),
    "dense-at-positions": (Dense(4, 3, positions=(2, 3)), (2, 3, 4)),
    "relu": (Relu((3, 4)), (3, 4)),
    "gelu": (Gelu((3, 4)), (3, 4)),
    "dropout": (Dropout((3, 4), 0.4, 3), (3, 4)),
    "reshape": (Reshape((12,)), (3, 4)),
    "conv-1x1": (Conv2d(IMAGE, 3, kernel=1), IMAGE),
    "conv-3x3-padded": (Conv2d(IMAGE, 3, kernel=3, padding=1, relu=True), IMAGE),
    "conv-3x3-stride-2": (Conv2d(IMAGE, 2, kernel=3, stride=2, padding=1), IMAGE),
    "conv-5x5-stride-3": (Conv2d(IMAGE, 2, kernel=5, stride=3, padding=2), IMAGE),
    "conv-of-vectors": (Conv2d(IMAGE, 2, kernel=2), (60,)),
    "max-2x2": (MaxPool(IMAGE, kernel=2, stride=2), IMAGE),
    "max-3x3-overlapping": (MaxPool(IMAGE, kernel=3, stride=2, padding=1), IMAGE),
    "average-2x2": (AveragePool(IMAGE, kernel=2, stride=2), IMAGE),
    "average-3x3-overlapping": (AveragePool(IMAGE, kernel=3, stride=1), IMAGE),
    "layer-norm": (LayerNorm((3, 4)), (3, 4)),
    "attention": (CausalSelfAttention(3, 4, 2, deviation=0.5, out_deviation=0.5), (3, 4)),
    "residual": (Residual([LayerNorm((3, 4)), Dense(4, 6, positions=(3,)), Gelu((3, 6)), Dense(6, 4, positions=(3,)),
                           Dropout((3, 4), 0.3, 1)]), (3, 4)),
}  # fmt: skip
KEY = RandomKey(1, 2, np.array([7, 3]))
BY_NAME = pytest.mark.parametrize("name", LAYERS)


def parameters_of(layer):
    random = np.random.default_rng(0)
    return [random.standard_normal(shape) * 0.5 + 0.1 for shape in layer.shapes]


def sample(shape, rows=2):
    return np.random.default_rng(5).standard_normal((rows, *shape))


def room():
    made = Workspace()
    made.key = KEY
    return made


def backward(layer, arrays, x, weights, *, add=False, gradients=None, below=True):
    """Return the gradients of ``sum(weights * layer(x))``."""
    place = room()
    layer.forward(arrays, x, place)
    gradients = [np.full(shape, np.nan) for shape in layer.shapes] if gradients is None else gradients
    into = layer.backward(arrays, weights.copy(), place, gradients, below=below, add=add)
    return gradients, into


def slopes(value, array):
    """Return central differences of ``value()`` by each element of `array`."""
    found, width = np.empty_like(array), 1e-6
    for place in np.ndindex(array.shape):
        kept = array[place]
        array[place] = kept + width
        above = value()
        array[place] = kept - width
        found[place] = (above - value()) / (2 * width)
        array[place] = kept
    return found


@BY_NAME
def test_gradients_match_finite_differences(name):
    layer, shape = LAYERS[name]
    arrays, x = parameters_of(layer), sample(shape)
    weights = np.random.default_rng(9).standard_normal((2, *layer.output))

    def value():
        return float((weights * layer.forward(arrays, x, room())).sum())

    gradients, into = backward(layer, arrays, x, weights)
    for array, gradient in zip(arrays, gradients, strict=True):
        np.testing.assert_allclose(gradient, slopes(value, array), rtol=1e-6, atol=1e-7)
    assert into.shape == x.shape
    np.testing.assert_allclose(into, slopes(value, x), rtol=1e-6, atol=1e-7)


@BY_NAME
def test_the_input_is_not_changed_and_gradients_can_be_added(name):
    layer, shape = LAYERS[name]
    arrays, x = parameters_of(layer), sample(shape)
    weights, kept = np.ones((2, *layer.output)), x.copy()
    once, _ = backward(layer, arrays, x, weights)
    twice, into = backward(layer, arrays, x, weights, add=True, gradients=[each.copy() for each in once], below=False)
    np.testing.assert_array_equal(x, kept)
    assert into is None
    for one, two in zip(once, twice, strict=True):
        np.testing.assert_allclose(two, 2 * one, rtol=1e-12)


@BY_NAME
def test_no_rows_and_fewer_rows_than_before(name):
    layer, shape = LAYERS[name]
    arrays, x = parameters_of(layer), sample(shape)
    place = room()
    both = layer.forward(arrays, x, place).copy()
    place.key = RandomKey(1, 2, np.array([3]))
    np.testing.assert_allclose(layer.forward(arrays, x[1:], place), both[1:], rtol=1e-12)
    place.key = RandomKey(1, 2, np.array([], np.int64))
    assert layer.forward(arrays, x[:0], place).shape == (0, *layer.output)
    gradients = [np.full(shape, np.nan) for shape in layer.shapes]
    layer.backward(arrays, np.empty((0, *layer.output)), place, gradients, below=True, add=False)
    assert all((gradient == 0).all() for gradient in gradients)


@BY_NAME
def test_float32_gives_the_float64_results_rounded(name):
    layer, shape = LAYERS[name]
    wide, x = parameters_of(layer), sample(shape).astype(np.float32)
    narrow = [array.astype(np.float32) for array in wide]
    found = layer.forward(narrow, x, room())
    assert found.dtype == np.float32
    arrays = [array.astype(float) for array in narrow]
    np.testing.assert_allclose(found, layer.forward(arrays, x.astype(float), room()), rtol=1e-4, atol=1e-5)


def test_dropout_depends_on_seed_step_sample_and_stream_only():
    layer, x = Dropout((400,), 0.25, 3), np.ones((3, 400))

    def kept(numbers, seed=1, step=2, made=layer):
        place = Workspace()
        place.key = RandomKey(seed, step, np.array(numbers))
        return made.forward((), x[: len(numbers)], place).copy()

    together = kept([5, 6, 7])
    np.testing.assert_array_equal(together[1:], kept([6, 7]))
    assert set(np.unique(together)) == {0.0, 4 / 3}
    assert abs((together == 0).mean() - 0.25) < 0.04
    others = (
        kept([6, 5, 7]),
        kept([5, 6, 7], seed=2),
        kept([5, 6, 7], step=3),
        kept([5, 6, 7], made=Dropout((400,), 0.25, 4)),
    )
    for other in others:
        assert (other[0] != together[0]).mean() > 0.2


def test_dropout_does_nothing_in_an_evaluation_and_refuses_rates():
    layer, x = Dropout((4,), 0.5, 0), np.ones((2, 4))
    assert layer.forward((), x, Workspace()) is x
    for rate in (-0.1, 1.0, math.nan):
        with pytest.raises(ValueError, match="rate"):
            Dropout((4,), rate, 0)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Conv2d((4, 4, 1), 2, kernel=7, padding=1), "kernel: 7 is more"),
        (lambda: Conv2d((4, 4, 1), 2, kernel=3, stride=0), "stride 0"),
        (lambda: Conv2d((4, 4, 1), 2, kernel=3, padding=3), "padding 3"),
        (lambda: MaxPool((4, 4, 1), kernel=3, stride=2, padding=2), "padding: 2"),
        (lambda: CausalSelfAttention(4, 6, 4), "heads: 4"),
    ],
)
def test_what_does_not_fit_is_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_a_position_does_not_see_later_ones():
    layer = CausalSelfAttention(5, 4, 2)
    arrays, x = parameters_of(layer), sample((5, 4))
    before = layer.forward(arrays, x, Workspace()).copy()
    x[:, 3:] += 1
    after = layer.forward(arrays, x, Workspace())
    np.testing.assert_array_equal(after[:, :3], before[:, :3])
    assert (after[:, 3:] != before[:, 3:]).all()


def test_pooling_reports_nan():
    images, out = np.zeros((1, 4, 4, 1)), np.empty((1, 2, 2, 1))
    images[0, 1, 1, 0] = np.nan
    network_layers.max_pool(images, out, np.empty(out.shape, np.int32), 2, 2, 0)
    assert np.isnan(out[0, 0, 0, 0])
    assert (out[0, 1:] == 0).all()


MODELS = {
    "alexnet": lambda: alexnet((8, 8, 1), 1, 3, np.float64, dropout=0.3),
    "transformer": lambda: transformer(4, 8, 2, 2, np.float64, dropout=0.2, deviation=0.3),
}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_models_match_finite_differences_in_random_places(name):
    model, random = MODELS[name](), np.random.default_rng(2)
    parameters = model.initial(1) + 0.05 * random.standard_normal(model.parameter_count)
    if name == "alexnet":
        x, y = random.standard_normal((2, 64)), np.array([0, 2])
    else:
        x, y = random.integers(0, 256, (2, 4)).astype(np.uint8), random.integers(0, 256, (2, 4))
    gradient = np.full_like(parameters, np.nan)
    model.loss_and_gradient(FlatParameters(model.layout, parameters, gradient), x, y, key=KEY)
    assert np.isfinite(gradient).all()
    trash, width = np.empty_like(gradient), 1e-5

    def loss():
        return model.loss_and_gradient(FlatParameters(model.layout, parameters, trash), x, y, key=KEY)[0]

    first = np.unique([span.start for spans in model.layout.spans for span in spans])
    for place in (*first, *random.choice(model.parameter_count, 60, replace=False)):
        parameters[place] += width
        above = loss()
        parameters[place] -= 2 * width
        slope = (above - loss()) / (2 * width)
        parameters[place] += width
        assert gradient[place] == pytest.approx(slope, rel=1e-5, abs=1e-7)


LAST = {
    "dense-relu": [Dense(4, 3, relu=True)],
    "relu": [Dense(4, 3), Relu((3,))],
    "gelu": [Dense(4, 3), Gelu((3,))],
    "layer-norm": [Dense(4, 3), LayerNorm((3,))],
    "conv-relu": [Conv2d((2, 2, 1), 3, kernel=2, relu=True)],
    "residual": [Dense(4, 3), Residual([Dense(3, 3), Relu((3,))])],
    "view": [Dense(4, 3, relu=True), Reshape((3,))],
}


@pytest.mark.parametrize("name", LAST)
def test_the_last_layer_of_a_model_may_need_its_output(name):
    """A loss replaces the outputs that it gets with their gradient."""
    model, random = Model(LAST[name], np.float64, regression), np.random.default_rng(4)
    parameters = random.standard_normal(model.parameter_count)
    x, y = random.standard_normal((5, 4)), random.standard_normal((5, 3)) + 1.0
    gradient, trash = np.empty_like(parameters), np.empty_like(parameters)
    found = model.loss_and_gradient(FlatParameters(model.layout, parameters, gradient), x, y)
    storage = FlatParameters(model.layout, parameters, trash)
    assert found == model.loss(storage, x, y)
    for place, slope in enumerate(slopes(lambda: model.loss(storage, x, y)[0], parameters)):
        assert gradient[place] == pytest.approx(slope, rel=1e-5, abs=1e-6)


def test_a_model_starts_with_the_loss_of_a_uniform_guess():
    model = transformer(16, 32, 4, 2, np.float32, dropout=0.0)
    x = np.arange(64, dtype=np.uint8).reshape(4, 16)
    loss, hits = model.loss(FlatParameters(model.layout, model.initial(0)), x, x.astype(np.int64))
    assert loss / 4 == pytest.approx(math.log(256), abs=0.1)
    assert hits == 0


# ---- PyTorch --------------------------------------------------------------------------------------------------------


def channels_first(torch, x):
    return torch.tensor(np.moveaxis(x, -1, 1).copy(), requires_grad=True)


@pytest.mark.parametrize("name", ["conv-3x3-padded", "conv-3x3-stride-2", "conv-5x5-stride-3", "max-3x3-overlapping",
                                  "average-3x3-overlapping"])  # fmt: skip
def test_image_layers_match_pytorch(name):
    torch = pytest.importorskip("torch")
    layer, shape = LAYERS[name]
    arrays, x = parameters_of(layer), sample(shape)
    image, functional = channels_first(torch, x), torch.nn.functional
    if isinstance(layer, Conv2d):
        kernel, stride, padding = layer.window
        weight = torch.tensor(arrays[0].reshape(kernel, kernel, shape[2], -1).transpose(3, 2, 0, 1).copy())
        out = functional.conv2d(image, weight, torch.tensor(arrays[1]), stride=stride, padding=padding)
        out = functional.relu(out) if layer.relu else out
    elif isinstance(layer, MaxPool):
        out = functional.max_pool2d(image, 3, stride=2, padding=1)
    else:
        out = functional.avg_pool2d(image, 3, stride=1)
    np.testing.assert_allclose(
        layer.forward(arrays, x, room()), np.moveaxis(out.detach().numpy(), 1, -1), rtol=1e-10, atol=1e-12
    )
    out.sum().backward()
    _, into = backward(layer, arrays, x, np.ones((2, *layer.output)))
    np.testing.assert_allclose(into, np.moveaxis(image.grad.numpy(), 1, -1), rtol=1e-10, atol=1e-12)


def test_sequence_layers_match_pytorch():
    torch = pytest.importorskip("torch")
    x, functional = sample((3, 4)), torch.nn.functional
    gelu = LAYERS["gelu"][0].forward((), x, Workspace())
    np.testing.assert_allclose(gelu, functional.gelu(torch.tensor(x), approximate="tanh").numpy(), rtol=1e-10)
    norm, arrays = LAYERS["layer-norm"][0], parameters_of(LAYERS["layer-norm"][0])
    expected = functional.layer_norm(torch.tensor(x), (4,), *map(torch.tensor, arrays))
    np.testing.assert_allclose(norm.forward(arrays, x, Workspace()), expected.numpy(), rtol=1e-10)
    attention, arrays = LAYERS["attention"][0], parameters_of(LAYERS["attention"][0])
    qkv = (x.reshape(-1, 4) @ arrays[0].reshape(4, -1)).reshape(2, 3, 3, 2, 2) + arrays[1]
    heads = torch.tensor(qkv.transpose(2, 0, 3, 1, 4).copy())
    mixed = functional.scaled_dot_product_attention(*heads, is_causal=True).numpy()
    expected = mixed.transpose(0, 2, 1, 3).reshape(2, 3, 4) @ arrays[2].reshape(4, 4) + arrays[3]
    np.testing.assert_allclose(attention.forward(arrays, x, Workspace()), expected, rtol=1e-10)


def test_a_model_of_layers_of_ones_own():
    model = Model([Conv2d((6, 6, 1), 4, kernel=3), AveragePool((4, 4, 4), kernel=4, stride=4), Reshape((4,)),
                   Dense(4, 2)], np.float64)  # fmt: skip
    gradient = np.empty(model.parameter_count)
    storage = FlatParameters(model.layout, model.initial(0), gradient)
    loss, hits = model.loss_and_gradient(storage, np.random.default_rng(0).random((5, 36)), np.zeros(5, np.int64))
    assert np.isfinite(loss)
    assert 0 <= hits <= 5
    assert (gradient != 0).any()
