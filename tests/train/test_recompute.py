"""Activations that are computed again: the same gradients to the bit, with less memory."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll.data.datasets import load
from mpicoll.errors import UsageError
from mpicoll.models.builders import alexnet, perceptron, transformer
from mpicoll.models.layers import RandomKey
from mpicoll.models.layers.batch_normalization import batch_norms
from mpicoll.models.sequential import FlatParameters, Model
from mpicoll.train.model_choice import build_model
from mpicoll.train.options import parse
from tests.own_models import Softmax

ROWS = 6


def _images(rows: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(1)
    return random.standard_normal((rows, 12 * 12 * 2)).astype(np.float32), random.integers(0, 5, rows)


def _bytes(rows: int) -> tuple[np.ndarray, np.ndarray]:
    text = np.random.default_rng(1).integers(0, 256, (rows, 9)).astype(np.uint8)
    return text[:, :-1], text[:, 1:]


def _alexnet(batch_norm: str) -> Model:
    return alexnet((12, 12, 2), 3, 5, np.float32, dropout=0.3, batch_norm=batch_norm)


MODELS: dict[str, tuple[Any, Any]] = {
    "perceptron": (lambda: perceptron((288, 9, 8, 7, 6, 5), np.float32), _images),
    "perceptron with batch normalisation": (
        lambda: perceptron((288, 9, 8, 5), np.float32, batch_norm="local"), _images,
    ),
    "alexnet": (lambda: _alexnet("none"), _images),
    "alexnet with batch normalisation": (lambda: _alexnet("local"), _images),
    "transformer": (lambda: transformer(8, 12, 2, 3, np.float32, dropout=0.2), _bytes),
}  # fmt: skip


def gradients(model: Model, data: tuple[np.ndarray, np.ndarray], steps: int = 2) -> tuple[list[Any], np.ndarray]:
    """Return losses and running statistics, and the gradients of two parts, added up."""
    parameters = model.initial(3)
    gradient = np.full_like(parameters, np.nan)
    storage, losses = FlatParameters(model.layout, parameters, gradient), []
    for step in range(steps):
        key = RandomKey(5, step, np.arange(len(data[0])))
        losses.append(model.loss_and_gradient(storage, *data, add=step > 0, key=key))
    losses.append(model.loss(storage, *data))
    return [*losses, *(layer.running.tolist() for layer in batch_norms(model.layers))], gradient


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_and_statistics_are_the_same_to_the_bit(name: str, length: int) -> None:
    make, data = MODELS[name]
    plain, again = make(), make()
    again.recompute = length
    expected, found = gradients(plain, data(ROWS)), gradients(again, data(ROWS))
    assert found[0] == expected[0]
    assert np.isfinite(expected[1]).all()
    assert found[1].tobytes() == expected[1].tobytes()


def test_the_derivative_of_the_input_is_the_same() -> None:
    make, data = MODELS["perceptron"]
    found = []
    for length in (None, 2):
        model = make()
        model.recompute = length
        parameters, tape = model.initial(0), model.tape()
        storage = FlatParameters(model.layout, parameters, np.empty_like(parameters))
        out = model.forward(storage, data(ROWS)[0], tape)
        found.append(model.backward(storage, np.ones_like(out), tape, below=True))
    assert found[0] is not None
    assert found[1] is not None
    assert found[0].tobytes() == found[1].tobytes()


def peak(model: Model, rows: int) -> int:
    """Return the most bytes that a step has allocated at once."""
    parameters = model.initial(0)
    storage = FlatParameters(model.layout, parameters, np.empty_like(parameters))
    x, y = np.ones((rows, 16), np.float32), np.zeros(rows, np.int64)
    tracemalloc.start()
    try:
        model.loss_and_gradient(storage, x, y)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_grows_with_the_root_of_the_layers() -> None:
    rows, widths = 5000, (16,) * 37  # 36 layers
    plain, again = perceptron(widths, np.float32), perceptron(widths, np.float32)
    again.recompute = 6
    one = rows * 16 * 4
    assert peak(plain, rows) > 60 * one  # two arrays of a layer
    # The inputs of 5 segments, the last segment and the one that is computed again.
    assert peak(again, rows) < 32 * one


def test_what_a_run_may_ask_for() -> None:
    config = parse(["--hidden", "9,8", "--recompute", "2"])
    dataset = load(config, MPI.COMM_SELF)
    assert build_model(config, dataset).recompute == 2
    with pytest.raises(UsageError, match="--recompute 3: the model has 3 layers"):
        build_model(replace(config, recompute=3), dataset)
    with pytest.raises(UsageError, match="--recompute needs a model of layers"):
        build_model(replace(config, model="tests.train.test_recompute:own_model"), dataset)


def own_model(facts: Any) -> Any:
    """Return a model that is not made of layers."""
    return Softmax()
