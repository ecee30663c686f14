"""Environments that differ between ranks: agreed on, or refused on every rank."""

from __future__ import annotations

import pytest

from tests.mpirun import run

PROGRAM = """
import os, sys
from mpi4py import MPI
rank = MPI.COMM_WORLD.rank
os.environ.update({variables}[rank])
import numpy as np, mpicoll
try:
    comm = mpicoll.Intracomm(MPI.COMM_WORLD, timeout=10)
    channel = comm.channel
    node = channel.cluster.node.node if channel.cluster else channel.node
    sys.stdout.write(f"made {{node and node.slot_nbytes}} {{channel.polls}} {{channel.check}}\\n")
    for count in (1, 300, 3000, 10_000, 30_000, 100_000):
        data = np.full(count, rank + 1.0)
        for _ in range(3):
            comm.Allreduce(MPI.IN_PLACE, data)
            data[:] = data / comm.size
        total = np.full(count, rank + 1.0)
        comm.Allreduce(MPI.IN_PLACE, total)
        assert (total == sum(range(1, comm.size + 1))).all()
except (ValueError, mpicoll.errors.MpicollError) as error:
    sys.stdout.write(f"{{type(error).__name__}} {{error}}\\n")
sys.stdout.flush()
"""


def outcomes(*variables: dict[str, str]) -> list[str]:
    """Run the program with these variables on rank 0, 1, ...; return the ranks' lines."""
    outcome = run(len(variables), ["-c", PROGRAM.format(variables=list(variables))], timeout=60)
    assert not outcome.hung, outcome.report
    assert outcome.returncode == 0, outcome.text
    return outcome.stdout.splitlines()


def test_a_node_is_oversubscribed_if_one_of_its_ranks_says_so() -> None:
    """It decides where the ranks look for each other's data."""
    lines = outcomes({"MPICOLL_CORES": "1"}, {"MPICOLL_CORES": "2"})
    assert len(lines) == 2
    assert {tuple(line.split()[:3]) for line in lines} == {("made", lines[0].split()[1], "1")}, lines


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("MPICOLL_CORES", "many", "'many' is not a number of cores"),
        ("MPICOLL_CHECK", "ful", "'ful' is not one of off, default, full"),
        ("MPICOLL_NODE", "of", "'of' is not one of on, off"),
        ("MPICOLL_NODES", "2;1", "'2;1' is not a list of positive numbers of ranks"),
    ],
)
def test_a_wrong_value_on_one_rank_is_an_error_on_all(variable: str, value: str, says: str) -> None:
    lines = outcomes({}, {variable: value}, {})
    assert sorted(line.split()[0] for line in lines) == ["RemoteError", "RemoteError", "ValueError"], lines
    assert all(f"{variable}: {says}" in line for line in lines)
    assert all("rank 1" in line for line in lines if line.startswith("RemoteError"))


def test_ranks_that_pretend_different_nodes_are_refused() -> None:
    lines = outcomes({"MPICOLL_NODES": "1,2"}, {}, {"MPICOLL_NODES": "1,2"})
    assert [line.startswith("ValueError MPICOLL_NODES: ") for line in lines] == [True] * 3, lines
    assert sum("'1,2'" in line for line in lines) == 2


def test_the_strictest_check_holds_for_all() -> None:
    lines = outcomes({}, {"MPICOLL_CHECK": "full"}, {"MPICOLL_CHECK": "off"})
    assert [line.split()[-1] for line in lines] == ["full"] * 3
