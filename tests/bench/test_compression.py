"""What is timed of compressors: error feedback too, where they need it."""

import numpy as np
import pytest
from mpi4py import MPI

from bench import compression
from bench.compression_kernels import OURS, Codec, specifications
from bench.result_files import UNTOUCHED
from mpicoll import Intracomm
from mpicoll.compression import compressor

NEED = ("sign", "topk:0.1", "oktopk:0.1", "powersgd:2")


@pytest.fixture(name="comms")
def _comms():
    return Intracomm(MPI.COMM_SELF), MPI.Intracomm(MPI.COMM_SELF)


def test_only_compressors_that_need_feedback_are_named_so():
    given = ("int8", "sign", "topk:0.01", "auto:int8", "auto:sign", "randomk:0.01")
    expected = ["int8", "sign +EF", "topk:0.01 +EF", "auto:int8", "auto:sign", "randomk:0.01"]
    assert [compression.contender(spec) for spec in given] == expected


@pytest.mark.parametrize("spec", NEED)
def test_the_allreduce_that_is_timed_feeds_errors_back(spec, comms, monkeypatch):
    steps = []
    real = compression.ErrorFeedback.open
    monkeypatch.setattr(
        compression.ErrorFeedback, "open", lambda self, count: (steps.append(spec), real(self, count))[1]
    )
    contest = compression.Compressed(comms, 40000, [spec])
    name = f"{spec} +EF"
    assert list(contest.calls) == ["native", "dense", name]
    for _ in range(5):
        contest.before[name]()
        contest.calls[name]()
    assert len(steps) == 5
    assert contest.wrong(name) == 0
    assert contest.detail(name, {})["rms error"] > 0


def test_vectors_are_written_before_each_call_unless_told_otherwise(comms):
    contest = compression.Compressed(comms, 400, ["int8"])
    assert set(contest.before) == {"native", "dense", "int8"}
    given = contest.given.copy()
    contest.before["int8"]()
    np.testing.assert_array_equal(contest.given, given)
    assert not compression.Compressed(comms, 400, ["int8"], UNTOUCHED).before


@pytest.mark.parametrize("spec", [spec for spec in specifications() if compressor(spec).fixed])
def test_encoding_contains_the_feedback_that_is_needed(spec):
    codec = Codec(spec, "encode", 20000)
    needs = compressor(spec).needs_feedback
    assert codec.case.variant == (f"{spec} +EF" if needs else spec)
    assert codec.calls[OURS]() > 0
    assert codec.wrong(OURS) == 0
    assert (codec._feedback is not None) == needs
    if codec._feedback is not None:
        codec.calls[OURS]()
        assert codec._feedback.steps == 2
        codec._feedback.reset = lambda: None  # what is owed from before comes along, as it should between steps
        assert codec.wrong(OURS) > 0
    assert Codec(spec, "decode", 4000).case.variant == spec
