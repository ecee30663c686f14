"""Gradients of sharded strategies in compressed messages, against the sum of what the ranks' payloads say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import mpicoll
from mpicoll import Intracomm
from mpicoll.compression import Key, compressor
from mpicoll.models.builders import perceptron
from mpicoll.models.sequential import Model
from mpicoll.parallel.compressed_chunks import CompressedReduceScatter, refusal
from mpicoll.parallel.parameter_groups import ParameterGroups
from mpicoll.train.config import TrainConfig
from tests.mpi.training.test_sharded import STAGES, Run

pytestmark = pytest.mark.mpi
SPECS = ("int8", "int4:block=128:rounding=stochastic", "fp8", "bf16", "fp16", "qsgd:4", "natural")
BASE = TrainConfig(momentum=0.9, bucket_bytes=1)


def wide(comm: Intracomm, widths: tuple[int, ...] = (7, 40, 3)) -> tuple[Model, ParameterGroups]:
    model = perceptron(widths, np.dtype(np.float32))
    return model, ParameterGroups(model, comm, 1)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("in_place", [False, True])
def test_a_chunk_is_the_sum_of_what_was_sent(comm: Intracomm, spec: str, in_place: bool) -> None:
    _, division = wide(comm)
    compressed, codec = CompressedReduceScatter(division, spec), compressor(spec)
    for step, part in ((0, 0), (0, 1), (7, 0)):
        compressed.begin(step, part, compress=True)
        for number, (unit, own) in enumerate(zip(division.units, division.own, strict=True)):
            given = [
                np.random.default_rng((step, rank)).standard_normal(unit.length, np.float32)
                for rank in range(comm.size)
            ]
            expected = np.zeros(own.stop - own.start, np.float32)
            for rank, vector in enumerate(given):
                payload = np.zeros(codec.wire_nbytes(expected.size), np.uint8)
                if expected.size:
                    key = Key(0, rank, (step << 20) + part, own.start)
                    codec.compress(vector[own.start - unit.start : own.stop - unit.start], payload, key)
                    decoded = np.empty_like(expected)
                    codec.decompress(payload, decoded)
                    expected = decoded if rank == 0 else expected + decoded
            data = given[comm.rank].copy()
            into = data[: expected.size] if in_place else np.full(unit.block, 9, np.float32)
            compressed.reduce(number, data, into)
            np.testing.assert_array_equal(into[: expected.size], expected)
            assert not into[expected.size :].any()


@pytest.mark.parametrize("shard", STAGES)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_steps_are_near_those_without_compression(comm: Intracomm, shard: str, accumulate: int) -> None:
    model = perceptron((7, 40, 30, 3), np.dtype(np.float32))
    dense = Run(model, comm, replace(BASE, shard=shard, accumulate=accumulate))
    close = Compressed(model, comm, replace(BASE, shard=shard, accumulate=accumulate, compression="fp16"))
    rough = Compressed(model, comm, replace(BASE, shard=shard, accumulate=accumulate, compression="int8"))
    for number in range(6):
        for run in (dense, close, rough):
            run.step(number)
    np.testing.assert_allclose(close.state(), dense.state(), atol=2e-3)
    np.testing.assert_allclose(rough.state(), dense.state(), atol=3e-2)
    assert (close.state() != dense.state()).any()


class Compressed(Run):
    """A run whose steps are compressed."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        gradients = self.engine.gradients
        self.engine.gradients = lambda *given, compress: gradients(*given, compress=True)  # type: ignore[method-assign]


@pytest.mark.parametrize("shard", STAGES)
def test_steps_that_are_not_compressed_have_the_bits_of_those_without(comm: Intracomm, shard: str) -> None:
    model = perceptron((7, 40, 30, 3), np.dtype(np.float32))
    runs = [Run(model, comm, replace(BASE, shard=shard, compression=spec)) for spec in (None, "int4")]
    for number in range(3):
        for run in runs:
            run.step(number)
    np.testing.assert_array_equal(runs[0].state(), runs[1].state())


def test_bytes_that_a_rank_sends_and_holds(comm: Intracomm) -> None:
    _, division = wide(comm, (256, 128, 10))
    compressed = CompressedReduceScatter(division, "int8")
    (unit, _), others = division.units, comm.size - 1
    assert compressed.sent_nbytes(unit) <= 0.27 * division.sent_nbytes(unit)
    assert compressed.sent_nbytes(unit) >= others * unit.block
    assert compressed.nbytes == 2 * comm.size * compressor("int8").wire_nbytes(unit.block)
    before = division.meter.traffic(0).sent
    compressed.reduce(0, np.ones(unit.length, np.float32), np.zeros(unit.block, np.float32))
    assert division.meter.traffic(0).sent == before + compressed.sent_nbytes(unit)


def test_compressors_that_do_not_fit() -> None:
    assert "needs error feedback" in refusal(compressor("sign"))
    assert "needs error feedback" in refusal(compressor("topk:0.1"))
    assert "by itself" in refusal(compressor("randomk:0.1"))
    assert not any(refusal(compressor(spec)) for spec in SPECS)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_optimizer_for_a_loop_of_ones_own(comm: Intracomm, stage: int) -> None:
    target = np.linspace(-1, 1, 300, dtype=np.float32)
    kinds = {"comm": comm, "stage": stage, "optimizer": "sgd", "lr": 0.2}
    optimizer = mpicoll.ShardedOptimizer([[np.zeros(300, np.float32)]], compression="int8", **kinds)
    for _ in range(40):
        (parameters,) = optimizer.gather(0)
        optimizer.complete(0, [parameters - target])
        optimizer.step()
    (parameters,) = optimizer.gather(0)
    np.testing.assert_allclose(parameters, target, atol=1e-2)
    with pytest.raises(ValueError, match="compression: 'sign' needs error feedback"):
        mpicoll.ShardedOptimizer([[np.zeros(3, np.float32)]], compression="sign", **kinds)
    with pytest.raises(ValueError, match="compression: 'int8' is for float32, not float64"):
        mpicoll.ShardedOptimizer([[np.zeros(3)]], compression="int8", **kinds)
