"""Contenders of the benchmark of collectives, and what is written before their calls."""

import numpy as np
import pytest
from mpi4py import MPI

from bench.baselines import WAYS
from bench.collectives import COLLECTIVES, BenchCollective
from bench.result_files import UNTOUCHED, WRITTEN
from mpicoll import Intracomm

NATIVES = ["native", "native persistent", "native Alloc_mem"]


class WithoutPersistent(MPI.Intracomm):
    """As where the MPI library is older than MPI-4."""

    def Allreduce_init(self, *_):
        raise NotImplementedError


def made(collective="allreduce", plain=MPI.Intracomm, **options):
    contest = BenchCollective(
        (Intracomm(MPI.COMM_SELF), plain(MPI.COMM_SELF)), collective, 4000, "float32", "SUM", **options
    )
    contest.add(["auto", "plan", "copy"], ways=WAYS)
    return contest


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_the_library_s_other_ways_stand_beside_its_plain_call(collective):
    contest = made(collective)
    missing = [note.partition(" is left out")[0] for note in contest.notes]
    assert [*contest.calls] == [name for name in [*NATIVES, "auto", "plan", "copy"] if name not in missing]
    assert all("this MPI library has no" in note for note in contest.notes)
    for name in contest.calls:
        assert contest.wrong(name) == 0
    contest.close()


def test_an_operation_that_the_library_lacks_is_left_out_with_the_reason():
    contest = made(plain=WithoutPersistent)
    assert [*contest.calls] == ["native", "native Alloc_mem", "auto", "plan", "copy"]
    assert contest.notes == ["native persistent is left out: this MPI library has no MPI_Allreduce_init"]
    contest.close()


@pytest.mark.parametrize("options", [{}, {"in_place": True}])
@pytest.mark.parametrize("collective", ["allreduce", "bcast"])
def test_each_contender_has_what_it_sends_written_before_its_calls(collective, options):
    options = options if collective == "allreduce" else {}
    contest = made(collective, buffers=WRITTEN, **options)
    assert set(contest.before) == set(contest.calls)
    for name, before in contest.before.items():
        send, recv = contest.buffers(name)
        sent = recv if options or collective == "bcast" else send
        sent[:] = contest.given
        before()
        np.testing.assert_array_equal(sent, contest.given)
        written = before.args[0]
        assert np.shares_memory(written, sent)
        assert written.nbytes == contest.given.nbytes
    contest.close()
    untouched = made(collective, buffers=UNTOUCHED, **options)
    assert not untouched.before
    untouched.close()


def test_contenders_with_memory_of_their_own_share_it_with_nobody():
    contest = made()
    ordinary, allocated, shared = (contest.buffers(name)[0] for name in ("native", "native Alloc_mem", "plan"))
    assert contest.buffers("auto")[0] is contest.buffers("native persistent")[0] is ordinary
    assert not np.shares_memory(allocated, ordinary)
    assert not np.shares_memory(shared, ordinary)
    contest.close()
