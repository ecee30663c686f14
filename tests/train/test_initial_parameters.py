"""Initial parameters by part, and losses of tasks."""

import math

import numpy as np
import pytest

from mpicoll.models import tasks
from mpicoll.models.builders import perceptron, transformer
from mpicoll.models.initial_parameters import DrawnParameters
from mpicoll.models.layers import Constant, Normal

BOUNDS = [0, 100_000, 100_003, 300_000]
INITIALS = (Normal(2.0), Constant(0.5), Normal(0.1))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_any_part_is_that_of_the_whole(dtype):
    drawn, whole = DrawnParameters(BOUNDS, INITIALS, 3), np.empty(300_000, dtype)
    drawn.fill(0, whole)
    for start, stop in [(0, 1), (65_535, 65_537), (99_990, 100_010), (131_000, 231_072), (299_999, 300_000), (7, 7)]:
        part = np.full(stop - start, np.nan, dtype)
        drawn.fill(start, part)
        np.testing.assert_array_equal(part, whole[start:stop])
    assert (whole[100_000:100_003] == 0.5).all()
    assert whole[:100_000].std() == pytest.approx(2, rel=0.01)
    assert whole[100_003:].std() == pytest.approx(0.1, rel=0.01)
    assert len(np.unique(whole[100_003:])) > 190_000  # no block repeats another


@pytest.mark.parametrize(("start", "count"), [(-1, 2), (299_999, 2)])
def test_a_part_that_is_not_there_is_refused(start, count):
    with pytest.raises(ValueError, match="not within"):
        DrawnParameters(BOUNDS, INITIALS, 3).fill(start, np.empty(count))


def test_float32_and_float64_start_alike():
    np.testing.assert_array_equal(
        perceptron((30, 20, 4), "float32").initial(1), perceptron((30, 20, 4), "float64").initial(1).astype(np.float32)
    )


def test_weights_before_an_addition_are_smaller():
    model = transformer(8, 64, 4, 2, "float64", dropout=0.0)
    flat = model.initial(0)
    span = model.layout.spans[2][4]  # the output of the first attention
    assert flat[span.start : span.stop].std() == pytest.approx(0.02 / math.sqrt(4), rel=0.05)


def slopes(loss, outputs, targets):
    found = np.empty_like(outputs)
    for place in np.ndindex(outputs.shape):
        values = []
        for shift in (1e-6, -1e-6):
            shifted = outputs.copy()
            shifted[place] += shift
            values.append(loss(shifted, targets)[0])
        found[place] = (values[0] - values[1]) / 2e-6
    return found


@pytest.mark.parametrize("name", tasks.LOSSES)
def test_losses_turn_outputs_into_their_gradient(name):
    random, loss = np.random.default_rng(0), tasks.LOSSES[name]
    shapes = {"classification": (4, 5), "regression": (4, 3), "language_modeling": (2, 3, 256)}
    outputs = random.standard_normal(shapes[name])
    targets = random.standard_normal((4, 3)) if name == "regression" else random.integers(0, 5, outputs.shape[:-1])
    expected, value = slopes(loss, outputs, targets), loss(outputs.copy(), targets)[0]
    if name == "regression":
        assert value == pytest.approx(((outputs - targets) ** 2).mean(axis=1).sum())
    if name == "language_modeling":
        chances = np.exp(outputs) / np.exp(outputs).sum(-1, keepdims=True)
        assert value == pytest.approx(-np.log(np.take_along_axis(chances, targets[..., None], -1)).sum() / 3)
    loss(outputs, targets)
    np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-8)


def test_a_regression_takes_a_single_target_without_an_axis():
    assert tasks.regression(np.array([[1.0], [4.0]]), np.array([0.0, 2.0])) == (5.0, 0)
