"""Whole models against PyTorch: losses and gradients of the same layers with the same parameters."""

import numpy as np
import pytest

from mpicoll.models.builders import alexnet, convolutional, perceptron, transformer
from mpicoll.models.sequential import FlatParameters

torch = pytest.importorskip("torch")
counterparts = pytest.importorskip("bench.torch_counterparts")

MODELS = {
    "perceptron": lambda: perceptron((40, 30, 20, 10), "float64"),
    "one-convolution": lambda: convolutional((9, 8, 2), 4, 10, "float64"),
    "alexnet-small-images": lambda: alexnet((17, 16, 3), 4, 10, "float64", dropout=0.0),
    "alexnet-large-images": lambda: alexnet((64, 67, 3), 2, 10, "float64", dropout=0.0),
    "transformer": lambda: transformer(12, 24, 3, 2, "float64", dropout=0.0),
}
ROWS, SEED = 5, 3


def samples(name, rng):
    if name == "transformer":
        text = rng.integers(0, 256, (ROWS, 13), np.uint8)
        return text[:, :-1].copy(), text[:, 1:].astype(np.int64)
    features = {"perceptron": 40, "one-convolution": 9 * 8 * 2, "alexnet-small-images": 17 * 16 * 3}
    x = rng.random((ROWS, features.get(name, 64 * 67 * 3)))
    return x, rng.integers(0, 10, ROWS)


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradient_are_those_of_pytorch(name):
    model, rng = MODELS[name](), np.random.default_rng(SEED)
    x, y = samples(name, rng)
    parameters, gradient = model.initial(SEED), np.empty(model.parameter_count)
    storage = FlatParameters(model.layout, parameters, gradient)
    loss, _ = model.loss_and_gradient(storage, x, y)

    theirs = counterparts.Counterpart(model, SEED)
    task = "language_modeling" if name == "transformer" else "classification"
    their_loss = counterparts.loss_of(task)(theirs(torch.from_numpy(x)), torch.from_numpy(y))
    their_loss.backward()
    assert loss == pytest.approx(their_loss.item(), rel=1e-12)
    ours = theirs.converted([storage.gradients(number) for number in range(len(model.layers))])
    for one, other in zip(ours, theirs.parameters(), strict=True):
        largest = abs(one).max()
        np.testing.assert_allclose(one, other.grad.numpy(), rtol=1e-9, atol=1e-11 * largest)


def test_a_layer_without_counterpart_is_named():
    model = perceptron((4, 3, 2), "float64", batch_norm="local")
    with pytest.raises(TypeError, match="layer: BatchNorm has no counterpart here"):
        counterparts.Counterpart(model, 0)
