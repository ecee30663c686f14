"""COMM_WORLD and COMM_SELF, which a program may replace in mpi4py, and attributes that it attaches to communicators."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

import mpicoll

pytestmark = pytest.mark.mpi


def test_predefined_communicators_are_never_freed() -> None:
    for comm in (MPI.COMM_WORLD, MPI.COMM_SELF):
        ours = mpicoll.Intracomm(comm)
        ours.free()
        assert ours.allreduce(1) == comm.size


def test_others_are_freed() -> None:
    comm = mpicoll.Intracomm(MPI.COMM_WORLD.Dup())
    comm.free()
    assert comm == MPI.COMM_NULL
    comm.free()


def test_another_communicator_of_that_name(monkeypatch: pytest.MonkeyPatch) -> None:
    world = MPI.COMM_WORLD
    monkeypatch.setattr(MPI, "COMM_WORLD", MPI.COMM_SELF)
    comm = mpicoll.Intracomm(world.Dup())
    assert comm.allreduce(1) == world.size
    comm.Free()


@pytest.mark.parametrize("has_topology", [False, True])
def test_attributes_are_not_copied_to_what_is_private(has_topology: bool) -> None:
    calls: list[str] = []
    key = MPI.Comm.Create_keyval(
        lambda comm, key, value: (calls.append("copy"), value)[1], lambda comm, key, value: calls.append("delete")
    )
    plain = MPI.COMM_WORLD.Create_cart([MPI.COMM_WORLD.size]) if has_topology else MPI.COMM_WORLD.Dup()
    plain.Set_attr(key, "resource")
    comm = (mpicoll.Cartcomm if has_topology else mpicoll.Intracomm)(plain)
    comm.Allreduce(MPI.IN_PLACE, np.ones(3))
    comm.Free()
    assert "delete" in calls
    assert has_topology or "copy" not in calls
    MPI.Comm.Free_keyval(key)
