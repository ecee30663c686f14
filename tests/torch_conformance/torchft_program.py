"""Run the process-group tests of torchft on the ranks of MPI, in place of its threads; see :mod:`records`.

They are part of the installed torchft (``torchft.process_group_test``). They call each collective of a group of several
ranks, then shut one rank down, after which the others must get an error in time. Rank r here is their thread r.
"""

from __future__ import annotations

import sys
import traceback
import unittest
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore
from torchft import process_group_test as theirs
from torchft.process_group import ProcessGroupWrapper

import mpicoll.torch
from mpicoll.consensus import share
from mpicoll.torch.group_communicators import communicator_of
from tests.torch_conformance.records import FAILED, PASSED, SKIPPED, WORLD, run_all

SECONDS = 30.0
OF_ONE_RANK = ("test_gloo_apis_0_cpu", "test_functional_collectives")
"""Their tests of a group of one rank, whose gloo is replaced."""


class ProcessGroupMpicoll(ProcessGroupWrapper):
    """A process group of torchft whose collectives are those of the backend mpicoll."""

    def _create_pg(self, store: Any, rank: int, world_size: int) -> mpicoll.torch.ProcessGroup:
        comm = communicator_of(store, rank, world_size, "torchft", [], self._timeout)
        return mpicoll.torch.ProcessGroup(comm, store, self._timeout, owns_comm=True)

    def set_timeout(self, timeout: timedelta) -> None:
        super().set_timeout(timeout)
        if self._pg is not None:
            self._pg.set_timeout(timeout)

    def getBackendName(self) -> str:
        return "torchft-mpicoll"


class OneThread:
    """Executor that makes the call of this rank, and none of those for the threads of others."""

    def submit(self, function: Any, *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        rank = next(each for each in arguments if isinstance(each, int))
        try:
            future.set_result(function(*arguments) if rank == WORLD.rank else None)
        except BaseException as error:
            future.set_exception(error)
        return future


class OfAllRanks(theirs.MultiPgBaseTest):
    """Their tests of a group of several ranks."""

    WORLD_SIZE = WORLD.size

    @classmethod
    def setUpClass(cls) -> None:
        first = WORLD.rank == 0
        cls.store = TCPStore("localhost", 0, None, True, wait_for_workers=False) if first else None
        port = share(WORLD, {"port": cls.store.port} if first else None)["port"]
        cls.store = cls.store or TCPStore("localhost", port, None, False)
        cls.executor = OneThread()
        group = ProcessGroupMpicoll(timeout=timedelta(seconds=SECONDS))
        group.configure(f"localhost:{port}/prefix", "0", WORLD.rank, WORLD.size)
        cls.pg_pool = [group] * WORLD.size

    @classmethod
    def tearDownClass(cls) -> None:
        cls.pg_pool[0].shutdown()

    def assertRaisesRegex(self, kind: Any, pattern: str, *arguments: Any, **named: Any) -> Any:
        """Expect an error that names the rank that was shut down, where theirs expects the words of gloo and NCCL."""
        ours = f"rank {WORLD.size - 1} did not arrive within 1 s"
        return super().assertRaisesRegex(kind, f"{pattern}|{ours}", *arguments, **named)  # noqa: PT027


def load() -> dict[str, unittest.TestCase]:
    """Return their tests, by name."""
    theirs.ProcessGroupGloo = ProcessGroupMpicoll
    for collective in theirs._ALL_COLLECTIVES:
        for kind, method in (("", "_run_parallel"), ("_with_resiliency", "_run_with_resiliency")):
            name = f"test_collective{kind}_{collective.replace('/', '_')}"

            def run(self: Any, method: str = method, collective: str = collective) -> None:
                getattr(self, method)(collective)

            setattr(OfAllRanks, name, run)
    cases = [theirs.ProcessGroupTest(name) for name in OF_ONE_RANK]
    cases += [OfAllRanks(name) for name in unittest.TestLoader().getTestCaseNames(OfAllRanks)]
    return {case.id().rpartition(".")[2]: case for case in cases}


def run_one(cases: dict[str, unittest.TestCase], name: str) -> tuple[str, str]:
    """Run a test; return how it ended on this rank, and why."""
    try:
        getattr(cases[name], name)()
    except unittest.SkipTest as reason:
        return SKIPPED, str(reason)
    except BaseException:
        return FAILED, traceback.format_exc()[-3000:]
    return PASSED, ""


def main() -> None:
    torch.set_num_threads(1)
    cases = load()
    OfAllRanks.setUpClass()
    run_all([name for name in sorted(cases) if sys.argv[1] in name], partial(run_one, cases), Path(sys.argv[2]))
    OfAllRanks.tearDownClass()


if __name__ == "__main__":
    main()
