"""Gradients that are compressed on their way."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll import GradientSynchronizer, Intracomm
from mpicoll.compression import compressor
from mpicoll.errors import MismatchError, MpicollError, RemoteError
from tests.mpi.compression.test_compressed import same_everywhere
from tests.mpi.compression.test_feedback import all_residuals

pytestmark = pytest.mark.mpi
SHAPES = [(40, 50), (50,), (3000,), (7,), (30, 80), (3, 3)]
"""Long and short ones, the long ones beside each other once."""


def gradient(rank: int, step: int, count: int) -> np.ndarray:
    return np.random.default_rng([rank, step]).standard_normal(count).astype(np.float32)


def mean(size: int, step: int, count: int) -> np.ndarray:
    """The mean with rank r weighing r + 1."""
    weighed = sum((rank + 1) * gradient(rank, step, count).astype(np.float64) for rank in range(size))
    return weighed / (size * (size + 1) / 2)


@pytest.mark.parametrize("spec", ["int8", "sign:block=32"])
@pytest.mark.parametrize("bucket_bytes", [4 << 20, 5000])
def test_short_parameters_and_weights_are_exact(comm: Intracomm, spec: str, bucket_bytes: int) -> None:
    sync = GradientSynchronizer(SHAPES, comm=comm, compression=spec, bucket_bytes=bucket_bytes)
    assert sync.error_feedback == (spec != "int8")
    for step in range(2):
        count = sync.flat.size
        sync.flat[:] = gradient(comm.rank, step, count)
        sync.synchronize(comm.rank + 1)
        assert same_everywhere(comm, sync.flat)
        expected, start = mean(comm.size, step, count), 0
        for shape, found in zip(SHAPES, sync.gradients, strict=True):
            wanted = expected[start : start + found.size].reshape(shape)
            start += found.size
            error = np.abs(found - wanted).max()
            assert error < 1e-6 if found.nbytes < 4096 else 1e-4 < error < (0.1 if spec == "int8" else 10)


def test_what_is_owed_arrives_later(comm: Intracomm) -> None:
    sync = GradientSynchronizer(SHAPES, comm=comm, compression="sign:block=32", average=False)
    arrived, given = np.zeros(sync.flat.size), np.zeros(sync.flat.size)
    for step in range(5):
        sync.flat[:] = gradient(comm.rank, step, sync.flat.size)
        sync.synchronize(compress=step != 1)
        arrived += sync.flat
        given += sum(gradient(rank, step, sync.flat.size).astype(np.float64) for rank in range(comm.size))
    owed = np.zeros(sync.flat.size)
    first, middle, last = (all_residuals(comm, feedback) for _, feedback in sync._feedback())
    owed[:2000], owed[2050:5050], owed[5057:7457] = first, middle, last
    np.testing.assert_allclose(arrived + owed, given, atol=1e-3)


@pytest.mark.parametrize("spec", ["sign", "topk:0.1", "powersgd:2"])
def test_a_step_without_weight_is_zero_and_keeps_what_is_owed(comm: Intracomm, spec: str) -> None:
    sync = GradientSynchronizer(SHAPES, comm=comm, compression=spec, bucket_bytes=5000)
    owed = []
    for weight in (32, 0, 0):
        sync.flat[:] = gradient(comm.rank, 0, sync.flat.size) if weight else np.nan
        sync.synchronize(weight)
        assert sync.flat.any() == bool(weight)
        owed.append(np.concatenate([all_residuals(comm, feedback) for _, feedback in sync._feedback()]))
    assert np.abs(owed[0]).max() > 1
    np.testing.assert_allclose(owed[1], owed[0], atol=1e-3)
    np.testing.assert_allclose(owed[2], owed[0], atol=1e-3)


def test_a_run_goes_on_from_its_checkpoint(comm: Intracomm) -> None:
    first, second = (GradientSynchronizer(SHAPES, comm=comm, compression="sign") for _ in range(2))
    first.flat[:] = gradient(comm.rank, 0, first.flat.size)
    first.synchronize()
    second.load(first.state())
    for sync in (first, second):
        sync.flat[:] = gradient(comm.rank, 1, sync.flat.size)
        sync.synchronize()
    np.testing.assert_array_equal(first.flat, second.flat)
    assert GradientSynchronizer(SHAPES, comm=comm, compression="int8").state() == {}
    before = first.state()
    for wrong in ({"9.residual": np.zeros(3)}, {**before, "0.residual": np.zeros(3, np.float32)}, {"0.steps": 1}):
        with pytest.raises(ValueError, match="state: "):
            first.load(wrong)
    for name, array in before.items():
        np.testing.assert_array_equal(first.state()[name], array)


@pytest.mark.parametrize("spec", ["int8", "sign", "fp16"])
def test_bytes_sent_are_those_of_two_shots(comm: Intracomm, spec: str) -> None:
    size, rank, count = comm.size, comm.rank, 1024 * comm.size
    sync = GradientSynchronizer([(count,), (5,)], comm=comm, compression=spec)
    sync.synchronize()
    shard = compressor(spec).wire_nbytes(1024)
    dense = 2 * (size - 1) * 6 * 4 // size
    assert sync.sent_nbytes == 2 * (size - 1) * shard + dense
    sync.synchronize(compress=False)
    assert sync.sent_nbytes == 2 * (size - 1) * shard + dense + 2 * (size - 1) * (count + 6) * 4 // size
    assert sync.nbytes == 2 * 4 * (count + 6)
    assert rank < size


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("change", [{"compression": "int4"}, {"error_feedback": True}, {"dense_bytes": 0}])
def test_ranks_that_compress_otherwise_are_named(comm: Intracomm, change: dict[str, object]) -> None:
    options = {"compression": "int8", **(change if comm.rank == comm.size - 1 else {})}
    with pytest.raises(MismatchError, match=r"differs? from the others in"):
        GradientSynchronizer(SHAPES, comm=comm, **options)


@pytest.mark.mpi(min_size=2)
def test_wrong_settings_of_one_rank_are_told(comm: Intracomm) -> None:
    dtype = "float64" if comm.rank == 0 else "float32"
    with pytest.raises((ValueError, MpicollError), match="float64" if comm.rank == 0 else "rank 0 refused"):
        GradientSynchronizer(SHAPES, comm=comm, compression="int8", dtype=dtype)


@pytest.mark.parametrize("spec", [None, "sign:block=32", "fp16", "topk:0.1"])
def test_buckets_under_way_while_others_are_computed(comm: Intracomm, spec: str | None) -> None:
    make = {"comm": comm, "compression": spec, "average": spec != "fp16", "bucket_bytes": 6000}
    blocking, overlapped = (GradientSynchronizer(SHAPES, **make) for _ in range(2))
    for step in range(3):
        given = gradient(comm.rank, step, blocking.flat.size)
        blocking.flat[:] = overlapped.flat[:] = given
        compress = step != 1
        blocking.synchronize(compress=compress)
        for first in (given.size - 5, 4000, 4000, 2020, 0):
            overlapped.start(first, compress=compress)
        overlapped.wait()
        np.testing.assert_array_equal(overlapped.flat, blocking.flat)
        assert overlapped.calls == blocking.calls
    if comm.size > 1:
        assert overlapped.sent_nbytes > 0
    overlapped.start(given.size - 5)
    with pytest.raises(RuntimeError, match="before start"):
        overlapped.wait()
    overlapped.start(0)
    overlapped.wait()


def test_matrices_keep_their_shapes(comm: Intracomm) -> None:
    sync = GradientSynchronizer(SHAPES, comm=comm, compression="powersgd:1")
    rows, columns = np.arange(1, 41, dtype=np.float32), np.linspace(-1, 1, 50, dtype=np.float32)
    sync.gradients[0][:] = (comm.rank + 1) * np.outer(rows, columns)
    sync.synchronize()
    np.testing.assert_allclose(sync.gradients[0], (comm.size + 1) / 2 * np.outer(rows, columns), atol=1e-3)
    assert sync.sent_nbytes < sync.nbytes


@pytest.mark.parametrize("weight", [float("nan"), -1.0, 1e300, 1e-300])
def test_a_weight_that_is_refused_on_one_rank_is_told_to_the_others(weight: float) -> None:
    made = Intracomm(MPI.COMM_WORLD.Dup(), timeout=20)
    synchronizer = GradientSynchronizer([(3,)], comm=made)
    with pytest.raises(ValueError if made.rank == 0 else RemoteError, match=r"weight: .* range of float32"):
        synchronizer.synchronize(weight if made.rank == 0 else 1.0)
    made.Free()


@pytest.mark.parametrize("algorithm", ["auto", "ring"])
def test_operations_of_synchronizers_that_are_gone_are_freed(comm: Intracomm, algorithm: str) -> None:
    """Otherwise lanes and slots of the communicator run out."""
    made = Intracomm(MPI.COMM_WORLD.Dup(), timeout=20, algorithm=algorithm)
    node = made.channel.node
    for _ in range(5):
        synchronizer = GradientSynchronizer([(64,)] * 8, comm=made, bucket_bytes=256)
        synchronizer.flat[:] = 1
        synchronizer.start()
        assert comm.size == 1 or made.channel.occupants or (node is not None and node.busy_lanes)
        synchronizer.wait()
        assert (synchronizer.flat == 1).all()
        del synchronizer
    assert node is None or node.busy_lanes == 0
    assert not made.channel.occupants
    made.Free()
