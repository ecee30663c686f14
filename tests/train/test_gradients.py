"""The synchronizer on one rank; several ranks are in tests/system."""

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll import Intracomm
from mpicoll.compression import names
from mpicoll.gradients import GradientSynchronizer, differing_ranks


def make(*shapes, **options):
    return GradientSynchronizer(list(shapes), **{"comm": MPI.COMM_SELF, **options})


def test_gradients_are_views_of_one_buffer_in_order():
    sync = make((2, 3), (), (4,), (0, 5))
    assert [g.shape for g in sync.gradients] == [(2, 3), (), (4,), (0, 5)]
    sync.flat[:] = np.arange(11)
    np.testing.assert_array_equal(sync.gradients[0], [[0, 1, 2], [3, 4, 5]])
    assert sync.gradients[1] == 6
    assert all(np.shares_memory(g, sync.flat) for g in sync.gradients if g.size)


def test_arrays_give_shape_and_dtype():
    sync = GradientSynchronizer([np.zeros((2, 2)), np.zeros(3)], comm=MPI.COMM_SELF)
    assert sync.flat.dtype == np.float64
    assert sync.flat.shape == (7,)


@pytest.mark.parametrize("bucket_bytes", [1, 4, 12, 4096])
@pytest.mark.parametrize("average", [True, False])
def test_buckets_cover_the_buffer_once_and_respect_their_size(bucket_bytes, average):
    sync = make((5,), (2,), bucket_bytes=bucket_bytes, average=average)
    assert sum(bucket.data.size for bucket in sync._dense) == 7 + average
    assert max(bucket.data.nbytes for bucket in sync._dense) <= max(4, bucket_bytes)


@pytest.mark.parametrize("weight", [1.0, 0.5, 3])
def test_mean_over_one_rank_changes_nothing_whatever_the_weight(weight):
    sync = make((3,), bucket_bytes=8)
    sync.flat[:] = [1, 2, 3]
    sync.synchronize(weight)
    np.testing.assert_array_equal(sync.flat, [1, 2, 3])
    assert sync.calls == 1
    assert sync.nbytes == 16
    assert sync.seconds > 0


def test_weight_zero_removes_even_nan():
    sync = make((3,))
    sync.flat[:] = np.nan
    sync.synchronize(0)
    np.testing.assert_array_equal(sync.flat, 0)


@pytest.mark.parametrize("weight", [-1, np.nan, np.inf])
def test_impossible_weights_are_refused(weight):
    with pytest.raises(ValueError, match="weight"):
        make((3,)).synchronize(weight)


def test_weight_without_average_is_refused():
    with pytest.raises(ValueError, match="average=False"):
        make((3,), average=False).synchronize(2)


@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        ([(3,)], {"compression": "int9"}, "compression: 'int9' is not one of"),
        ([(3,)], {"error_feedback": True}, "no meaning without compression"),
        ([(3,)], {"dense_bytes": -1}, "dense_bytes: -1"),
        ([(3,)], {"bucket_bytes": 0}, "bucket_bytes: 0"),
        ([(3,)], {"dtype": "int32"}, "dtype"),
        ([(3,)], {"dtype": "float16"}, "dtype"),
        ([(3,)], {"dtype": ">f4"}, "dtype"),
        ([(-3,)], {}, "negative"),
        ([np.zeros(3), np.zeros(3, np.float32)], {}, "one dtype"),
        ([np.zeros(3)], {"dtype": "float32"}, "was asked for"),
    ],
)
def test_wrong_arguments_are_refused(shapes, options, message):
    with pytest.raises(ValueError, match=message):
        make(*shapes, **options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"compression": "sign", "dtype": "float64"}, ValueError, "'sign' is for float32, not float64"),
        ({"compression": "int4:rounding=stochastic", "error_feedback": True}, ValueError, "is unbiased"),
        ({"compression": "int9"}, ValueError, "'int9' is not one of"),
        ({"compression": "sign", "error_feedback": "on"}, TypeError, "'on' is not True"),
        ({"compression": "sign", "comm": MPI.COMM_SELF}, TypeError, "needs an mpicoll.Intracomm, not <mpi4py"),
    ],
)
def test_compression_that_cannot_be_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        GradientSynchronizer([(3,)], **{"comm": Intracomm(MPI.COMM_SELF), **options})


@pytest.mark.parametrize("spec", names())
def test_error_feedback_is_for_compressors_that_need_it(spec):
    sync = GradientSynchronizer([(3,)], comm=Intracomm(MPI.COMM_SELF), compression=spec)
    assert sync.error_feedback == (spec in ("sign", "topk", "oktopk", "sampled", "powersgd"))


def test_arrays_and_shapes_do_not_mix():
    with pytest.raises(TypeError, match="not both"):
        make(np.zeros(3), (3,))


def test_no_parameters_are_no_problem():
    sync = make()
    sync.synchronize()
    assert sync.gradients == []


def test_one_rank_never_differs():
    assert differing_ranks(MPI.COMM_SELF, bytes(32)) == ()


class ForeignScalar:
    """An element of a float tensor: a number, but no integer."""

    def __int__(self):
        return 0

    def __float__(self):
        return 0.5

    def __index__(self):
        raise TypeError("only integer tensors of a single element can be converted to an index")


class Foreign:
    """An array of another library: what torch.Tensor and jax.Array have in common."""

    def __init__(self, shape, dtype):
        self.shape, self.dtype, self.ndim = shape, dtype, len(shape)

    def __len__(self):
        return self.shape[0]

    def __iter__(self):
        return iter([ForeignScalar()] * self.shape[0])


class TorchDtype:
    """``torch.float32`` has no name and is no NumPy dtype."""

    def __init__(self, text):
        self._text = text

    def __repr__(self):
        return f"torch.{self._text}"


@pytest.mark.parametrize("kind", [TorchDtype, np.dtype])
@pytest.mark.parametrize("name", ["float32", "float64"])
def test_arrays_of_other_libraries_give_shape_and_dtype(kind, name):
    weights, bias = Foreign((2, 3), kind(name)), Foreign((3,), kind(name))
    sync = GradientSynchronizer((each for each in (weights, bias)), comm=MPI.COMM_SELF)
    assert [gradient.shape for gradient in sync.gradients] == [(2, 3), (3,)]
    assert sync.flat.dtype == name


@pytest.mark.parametrize("dtype", [TorchDtype("bfloat16"), TorchDtype("int64"), np.dtype(np.int32)])
def test_arrays_of_other_libraries_with_a_wrong_dtype_are_refused(dtype):
    with pytest.raises(ValueError, match="dtype"):
        make(Foreign((3,), dtype))


@pytest.mark.parametrize("one", [np.zeros((2, 2)), Foreign((3,), np.dtype(np.float32))])
def test_an_array_in_place_of_a_list_of_arrays_is_refused(one):
    with pytest.raises(TypeError, match=r"parameters_or_shapes: .* not one array"):
        GradientSynchronizer(one, comm=MPI.COMM_SELF)


@pytest.mark.parametrize("shape", [3, (2.5,), ("3",), None])
def test_what_is_neither_array_nor_shape_is_refused(shape):
    with pytest.raises(TypeError, match=r"parameters_or_shapes: .* neither an array nor a shape"):
        make((2,), shape)


def test_a_step_that_is_under_way_excludes_other_calls():
    sync = make((3,), (2,), compression="sign", comm=Intracomm(MPI.COMM_SELF))
    sync.flat[:] = 1
    sync.start(3)
    for call in (sync.synchronize, sync.state, lambda: sync.load({})):
        with pytest.raises(RuntimeError, match=r"between start\(\) and wait\(\)"):
            call()
    with pytest.raises(ValueError, match="compress: False"):
        sync.start(0, compress=False)
    sync.start(0)
    sync.wait()
    np.testing.assert_array_equal(sync.flat, 1)
    sync.synchronize()


@pytest.mark.parametrize("first", [-1, 6, 1.5])
def test_elements_that_are_not_there_are_refused(first):
    sync = make((5,))
    with pytest.raises((ValueError, TypeError), match=f"first: {first}"):
        sync.start(first)
