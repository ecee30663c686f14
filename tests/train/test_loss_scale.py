"""Dynamic loss scale, and conversions of mixed precision."""

import ml_dtypes
import numpy as np
import pytest

from mpicoll.errors import NonFiniteLoss, UsageError
from mpicoll.models.builders import perceptron
from mpicoll.models.initial_parameters import StoredParameters
from mpicoll.optim.loss_scale import LossScale
from mpicoll.parallel.mixed_precision import RoundedParameters, WidenedLayer, narrow, widen
from mpicoll.train.options import parse


def test_it_halves_at_an_overflow_and_doubles_after_an_interval():
    scale = LossScale(1024.0, 3)
    found = []
    for finite in (True, False, True, True, True, True, True, True, False):
        assert scale.accept(finite=finite) == finite
        found.append(scale.factor)
    assert found == [1024, 512, 512, 512, 1024, 1024, 1024, 2048, 1024]
    assert scale.skipped == 2


def test_it_has_a_smallest_and_a_largest_factor():
    scale = LossScale(2.0**24, 1)
    assert scale.accept(finite=True)
    assert scale.factor == 2.0**24
    for _ in range(38):
        assert not scale.accept(finite=False)
    assert scale.factor == 2.0**-14
    with pytest.raises(NonFiniteLoss, match="smallest loss scale"):
        scale.accept(finite=False)


@pytest.mark.parametrize(
    ("given", "says"),
    [((3.0, 5), "initial: 3.0"), ((0.0, 5), "initial: 0.0"), ((2.0**25, 5), "initial"), ((1.0, 0), "interval: 0")],
)
def test_settings_out_of_range_are_refused(given, says):
    with pytest.raises(ValueError, match=says):
        LossScale(*given)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_conversions_are_those_of_numpy(dtype):
    wide = np.random.default_rng(1).standard_normal((7, 11)).astype(np.float32)
    wide[0, :3] = np.inf, 1e30, 1e-30
    low, back = np.empty(wide.shape, dtype), np.ones(wide.shape, np.float32)
    narrow(wide, low)
    with np.errstate(over="ignore"):
        expected = wide.astype(dtype)
    np.testing.assert_array_equal(low.view(np.uint16), expected.view(np.uint16))
    widen(low, back, add=True)
    np.testing.assert_array_equal(back, 1 + expected.astype(np.float32))


def test_initial_parameters_are_rounded_block_by_block():
    exact = np.random.default_rng(2).standard_normal(150_000).astype(np.float32)
    found = np.empty(140_000, np.float16)
    RoundedParameters(StoredParameters(exact)).fill(7, found)
    np.testing.assert_array_equal(found, exact[7:140_007].astype(np.float16))


def test_a_layer_is_widened_into_memory_for_one_layer():
    model = perceptron((5, 4, 3), "float32")
    low = [np.full(shape, 0.5, np.float16) for shape in model.layers[1].shapes]
    room = WidenedLayer(model.layout)
    found = room.widened(1, low)
    assert room.nbytes == 4 * 24
    assert [array.shape for array in found] == [(4, 3), (3,)]
    assert all((array == 0.5).all() and array.dtype == np.float32 for array in found)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--precision float8", "--precision"),
        ("--precision float16 --dtype float64", "--precision float16 is for --dtype float32, not float64"),
        ("--precision bfloat16 --strategy local", "--precision bfloat16 is not for --strategy local"),
        ("--precision bfloat16 --strategy gossip", "--precision bfloat16 is not for --strategy gossip"),
        ("--precision float16 --compression int8", "--compression is not for --precision float16"),
        ("--precision float16 --algorithm native", "--algorithm native is not for --precision float16"),
        ("--precision bfloat16 --loss-scale 8", "--loss-scale is for --precision float16, not bfloat16"),
        ("--loss-scale-interval 8", "--loss-scale-interval is for --precision float16, not full"),
        ("--precision float16 --loss-scale 3", "'3' is not a power of two"),
        ("--batch-norm local --model logistic", "--batch-norm is for --model mlp or alexnet, not logistic"),
        ("--batch-norm local --tensor 2", "--batch-norm is not for --tensor"),
    ],
)
def test_options_that_do_not_fit_are_refused(words, says):
    with pytest.raises(UsageError, match=says):
        parse(words.split())
