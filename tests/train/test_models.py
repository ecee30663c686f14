"""Hand-derived gradients against finite differences, in float64."""

import numpy as np
import pytest

from mpicoll.models.builders import convolutional, perceptron
from mpicoll.models.sequential import FlatParameters, Model
from mpicoll.optim.update_rule import ParameterSpan

MODELS = {
    "logistic": (lambda dtype: perceptron((12, 4), dtype), 12, 4),
    "mlp": (lambda dtype: perceptron((12, 7, 5, 4), dtype), 12, 4),
    "conv": (lambda dtype: convolutional((5, 4, 2), 3, 4, dtype), 40, 4),
}


def gradient_into(model: Model, parameters, x, y, gradient, *, add=False):
    return model.loss_and_gradient(FlatParameters(model.layout, parameters, gradient), x, y, add=add)


def loss_of(model: Model, parameters, x, y):
    return model.loss(FlatParameters(model.layout, parameters), x, y)


def batch(features, classes, rows, dtype=np.float64, seed=1):
    random = np.random.default_rng(seed)
    return random.standard_normal((rows, features)).astype(dtype), random.integers(0, classes, rows)


def parameters_away_from_kinks(model):
    random = np.random.default_rng(3)
    return (model.initial(2) + 0.1 * random.standard_normal(model.parameter_count)).astype(model.dtype)


@pytest.mark.parametrize("name", MODELS)
def test_gradient_matches_finite_differences(name):
    make, features, classes = MODELS[name]
    model = make(np.float64)
    x, y = batch(features, classes, 6)
    parameters = parameters_away_from_kinks(model)
    gradient = np.full_like(parameters, np.nan)
    gradient_into(model, parameters, x, y, gradient)

    width = 1e-6
    expected = np.empty_like(gradient)
    for i in range(model.parameter_count):
        shifted = parameters.copy()
        shifted[i] += width
        above, _ = loss_of(model, shifted, x, y)
        shifted[i] -= 2 * width
        below, _ = loss_of(model, shifted, x, y)
        expected[i] = (above - below) / (2 * width)
    np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_and_losses_are_sums_over_rows(name):
    make, features, classes = MODELS[name]
    model = make(np.float64)
    x, y = batch(features, classes, 7)
    parameters = parameters_away_from_kinks(model)
    whole, first, second = (np.empty_like(parameters) for _ in range(3))
    loss, correct = gradient_into(model, parameters, x, y, whole)
    first_loss, first_correct = gradient_into(model, parameters, x[:2], y[:2], first)
    second_loss, second_correct = gradient_into(model, parameters, x[2:], y[2:], second)
    np.testing.assert_allclose(whole, first + second, rtol=1e-12, atol=1e-12)
    assert loss == pytest.approx(first_loss + second_loss, rel=1e-14)
    assert correct == first_correct + second_correct


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_no_rows_give_zero_gradient(name, dtype):
    make, features, classes = MODELS[name]
    model = make(dtype)
    x, y = batch(features, classes, 0, dtype)
    gradient = np.full(model.parameter_count, np.nan, dtype)
    assert gradient_into(model, model.initial(0), x, y, gradient) == (0.0, 0)
    np.testing.assert_array_equal(gradient, 0)


@pytest.mark.parametrize("name", MODELS)
def test_large_batch_then_small_batch_reuses_memory_without_leftovers(name):
    make, features, classes = MODELS[name]
    used, fresh = make(np.float32), make(np.float32)
    parameters = used.initial(0)
    scratch, expected, found = (np.empty_like(parameters) for _ in range(3))
    gradient_into(used, parameters, *batch(features, classes, 9, np.float32, seed=5), scratch)
    x, y = batch(features, classes, 4, np.float32)
    assert gradient_into(used, parameters, x, y, found) == gradient_into(fresh, parameters, x, y, expected)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", MODELS)
def test_float32_gradient_is_the_float64_gradient_rounded(name):
    make, features, classes = MODELS[name]
    single, double = make(np.float32), make(np.float64)
    parameters = single.initial(4)
    x, y = batch(features, classes, 8, np.float32)
    narrow, wide = np.empty_like(parameters), np.empty(len(parameters))
    loss, _ = gradient_into(single, parameters, x, y, narrow)
    reference, _ = gradient_into(double, parameters.astype(float), x.astype(float), y, wide)
    assert narrow.dtype == np.float32
    assert loss == pytest.approx(reference, rel=1e-5)
    np.testing.assert_allclose(narrow, wide, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_initial_depends_on_the_seed_alone_and_biases_are_zero(name):
    make, _, _ = MODELS[name]
    model = make(np.float32)
    np.testing.assert_array_equal(model.initial(1), make(np.float32).initial(1))
    assert (model.initial(1) != model.initial(2)).any()
    spans = [span for layer in model.layout.spans for span in layer]
    assert [span.start for span in spans[1:]] == [span.stop for span in spans[:-1]]
    assert spans[-1].stop == model.parameter_count
    for span in spans:
        assert (model.initial(1)[span.start : span.stop] != 0).all() == span.decays


@pytest.mark.parametrize("name", MODELS)
def test_one_nan_parameter_makes_the_loss_nan(name):
    make, features, classes = MODELS[name]
    model = make(np.float32)
    x, y = batch(features, classes, 3, np.float32)
    for place in (0, model.parameter_count // 2, model.parameter_count - 1):
        parameters = model.initial(0)
        parameters[place] = np.nan
        assert np.isnan(loss_of(model, parameters, x, y)[0])


@pytest.mark.parametrize("name", MODELS)
def test_gradients_can_be_added(name):
    make, features, classes = MODELS[name]
    model = make(np.float64)
    x, y = batch(features, classes, 7)
    parameters = parameters_away_from_kinks(model)
    whole, added = np.empty_like(parameters), np.full_like(parameters, np.nan)
    gradient_into(model, parameters, x, y, whole)
    gradient_into(model, parameters, x[:3], y[:3], added)
    gradient_into(model, parameters, x[3:], y[3:], added, add=True)
    np.testing.assert_allclose(added, whole, rtol=1e-12, atol=1e-12)


def test_what_goes_into_the_first_layer_has_a_gradient_too():
    model = perceptron((6, 5, 4), np.float64)
    x, y = batch(6, 4, 3)
    parameters = parameters_away_from_kinks(model)
    storage, tape = FlatParameters(model.layout, parameters, np.empty_like(parameters)), model.tape()
    logits = model.forward(storage, x, tape)
    powers = np.exp(logits)
    found = model.backward(storage, powers / powers.sum(1, keepdims=True) - np.eye(4)[y], tape, below=True)
    width, expected = 1e-6, np.empty_like(x)
    for place in np.ndindex(x.shape):
        shifted = x.copy()
        shifted[place] += width
        above = loss_of(model, parameters, shifted, y)[0]
        shifted[place] -= 2 * width
        expected[place] = (above - loss_of(model, parameters, shifted, y)[0]) / (2 * width)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


def test_spans_of_a_part():
    layout = perceptron((2, 3, 4), np.float32).layout  # 6 weights, 3 biases, 12 weights, 4 biases
    assert layout.decayed(0, 25) == [
        ParameterSpan(0, 6, True),
        ParameterSpan(6, 9, False),
        ParameterSpan(9, 21, True),
        ParameterSpan(21, 25, False),
    ]
    assert layout.decayed(4, 10) == [ParameterSpan(0, 2, True), ParameterSpan(2, 5, False), ParameterSpan(5, 6, True)]
    assert layout.decayed(7, 7) == []
