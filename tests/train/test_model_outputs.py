"""Outputs of a model, labels and losses that do not fit each other are refused, before a kernel sees them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll.data.datasets import load
from mpicoll.errors import DataError, UsageError
from mpicoll.models import tasks
from mpicoll.models.layers import BatchNorm, ByteEmbedding, Dense, Residual
from mpicoll.models.sequential import Model
from mpicoll.train.config import SHRINK, TrainConfig
from mpicoll.train.model_choice import build_model
from mpicoll.train.options import parse

# ---- losses ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("labels", [[0, 1, 2, 40], [0, 1, 2, 3], [0, -1, 2, 1], [0, 1 << 40, 1, 2]])
def test_a_label_that_is_no_output_is_refused(labels: list[int]) -> None:
    kept = np.arange(12, dtype=np.float32).reshape(4, 3)
    logits, wrong = kept.copy(), next(label for label in labels if not 0 <= label < 3)
    with pytest.raises(DataError, match=f"classification: label {wrong} is not one of the model's outputs, 0 to 2"):
        tasks.classification(logits, np.array(labels))
    np.testing.assert_array_equal(logits, kept)


def test_a_byte_that_is_no_output_is_refused() -> None:
    with pytest.raises(DataError, match="language_modeling: label 255 is not one of the model's outputs, 0 to 254"):
        tasks.language_modeling(np.zeros((2, 3, 255)), np.array([[1, 2, 254], [0, 255, 3]]))


@pytest.mark.parametrize(
    ("task", "outputs", "targets"),
    [
        ("classification", (4, 3), np.zeros(5, np.int64)),
        ("classification", (4, 3), np.zeros(3, np.int64)),
        ("classification", (4, 3), np.zeros((4, 1), np.int64)),
        ("classification", (4, 2, 3), np.zeros(4, np.int64)),
        ("language_modeling", (2, 3, 256), np.zeros((2, 4), np.int64)),
        ("language_modeling", (2, 256), np.zeros((2, 3), np.int64)),
        ("language_modeling", (2, 256), np.zeros(2, np.int64)),
        ("regression", (4, 3), np.zeros((4, 2))),
        ("regression", (4, 2), np.zeros(4)),
        ("regression", (4,), np.zeros(4)),
    ],
)
def test_shapes_that_do_not_fit_are_refused(task: str, outputs: tuple[int, ...], targets: np.ndarray) -> None:
    with pytest.raises(DataError) as caught:
        tasks.LOSSES[task](np.zeros(outputs), targets)
    assert str(caught.value).startswith(f"{task}: ")
    assert str(targets.shape) in str(caught.value)
    assert str(outputs) in str(caught.value)


def test_labels_that_are_not_whole_numbers_are_refused() -> None:
    with pytest.raises(DataError, match="classification: labels are float64, not whole numbers"):
        tasks.classification(np.zeros((4, 3)), np.zeros(4))


def test_no_samples_are_no_error() -> None:
    assert tasks.classification(np.zeros((0, 3)), np.zeros(0, np.int64)) == (0.0, 0)


# ---- models of layers of one's own ----------------------------------------------------------------------------------


def of_width(facts: Any, outputs: int, **options: Any) -> Model:
    return Model([Dense(facts.feature_count, 16, relu=True), Dense(16, outputs)], facts.dtype, **options)


def few(facts: Any) -> Model:
    """Return a model with fewer outputs than classes."""
    return of_width(facts, 3)


def more(facts: Any) -> Model:
    """Return a model with more outputs than classes."""
    return of_width(facts, facts.output_count + 2)


def of_task(facts: Any) -> Model:
    """Return a model with the loss of the task."""
    return of_width(facts, facts.output_count, loss_function=tasks.LOSSES[facts.task])


def with_more_targets(facts: Any) -> Model:
    """Return a model with more outputs than a regression has targets."""
    return of_width(facts, facts.output_count + 1, loss_function=tasks.LOSSES[facts.task])


def of_own_loss(facts: Any) -> Model:
    """Return a model whose loss nobody but its author knows."""
    return of_width(facts, 1, loss_function=lambda outputs, targets: (0.0, 0))


def of_bytes(facts: Any, values: int) -> Model:
    width, positions = 8, (facts.feature_count,)
    layers = [ByteEmbedding(facts.feature_count, width), Dense(width, values, positions=positions)]
    return Model(layers, facts.dtype, tasks.language_modeling)


def few_bytes(facts: Any) -> Model:
    """Return a language model with fewer outputs than values of a byte."""
    return of_bytes(facts, 255)


def all_bytes(facts: Any) -> Model:
    """Return a language model."""
    return of_bytes(facts, 256)


def flat_bytes(facts: Any) -> Model:
    """Return a model with the loss of a language model, and one prediction for all positions."""
    return of_width(facts, 256, loss_function=tasks.language_modeling)


def normalized(facts: Any) -> Model:
    """Return a model with a batch normalisation inside of another layer."""
    block = Residual([Dense(16, 16), BatchNorm((16,))])
    return Model([Dense(facts.feature_count, 16), block, Dense(16, facts.output_count)], facts.dtype)


def built(factory: str, words: str, **options: Any) -> Model:
    config: TrainConfig = replace(parse([f"--model={__name__}:{factory}", *words.split()]), **options)
    return build_model(config, load(config, MPI.COMM_SELF))


SAMPLES, TEXT = "--dataset synthetic:400x20x10", "--dataset synthetic_text:600 --context 8"


@pytest.mark.parametrize(
    ("factory", "words", "says"),
    [
        ("few", SAMPLES, r"outputs of shape (3,); --task classification on --dataset synthetic:400x20x10 needs (10,)"),
        ("few_bytes", TEXT, "outputs of shape (8, 255); --task language_modeling on --dataset synthetic_text:600"),
        ("flat_bytes", TEXT, "outputs of shape (256,); --task language_modeling"),
        ("few", f"{SAMPLES} --task regression", "--task regression: --model {name}:few has the loss of classification"),
        ("with_more_targets", f"{SAMPLES} --task regression", "outputs of shape (11,); --task regression on"),
        ("all_bytes", SAMPLES, "--task classification: --model {name}:all_bytes has the loss of language_modeling"),
        ("few", TEXT, "--task language_modeling: --model {name}:few has the loss of classification"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(factory: str, words: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        built(factory, words)
    assert says.replace("{name}", __name__) in str(caught.value)
    assert f"--model {__name__}:{factory}" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        ("more", SAMPLES),
        ("of_task", SAMPLES),
        ("of_task", f"{SAMPLES} --task regression"),
        ("of_own_loss", SAMPLES),
        ("of_own_loss", f"{SAMPLES} --task regression"),
        ("all_bytes", TEXT),
        ("normalized", SAMPLES),
    ],
)
def test_a_model_that_fits_is_taken(factory: str, words: str) -> None:
    assert built(factory, words).parameter_count


def test_a_run_that_goes_on_without_dead_ranks_has_no_batch_normalisation() -> None:
    with pytest.raises(UsageError, match="--on-failure shrink is not for batch normalisation, which the model of"):
        built("normalized", SAMPLES, on_failure=SHRINK)
    assert built("more", SAMPLES, on_failure=SHRINK).parameter_count
