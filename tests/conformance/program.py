"""What every rank runs: modules of mpi4py's tests, in which the predefined communicators are mpicoll's.

``program.py TESTS RESULTS MODULE...``: outcomes go to ``RESULTS/rank-N.json``.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import unittest
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from mpi4py import MPI

import mpicoll
from mpicoll.kernels.precompile import compile_shared
from tests.conformance.scope import left_out

RANK = MPI.COMM_WORLD.rank
TIMEOUT = 30.0


class Outcomes(unittest.TestResult):
    """Notes how each test ended; the launcher's deadline is for one test."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: dict[str, tuple[str, str]] = {}
        self.seconds: dict[str, float] = {}

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self.entries[test.id()] = ("passed", "")
        self._begun = time.monotonic()
        _note(test.id())

    def stopTest(self, test: unittest.TestCase) -> None:
        super().stopTest(test)
        self.seconds[test.id()] = time.monotonic() - self._begun
        _note("")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        super().addSkip(test, reason)
        self.entries[test.id()] = ("skipped", reason)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        super().addFailure(test, err)
        self._fail(test, err)

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        super().addError(test, err)
        self._fail(test, err)

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:
        super().addSubTest(test, subtest, err)
        if err is not None:
            self._fail(test, err)

    def _fail(self, test: unittest.TestCase, err: Any) -> None:
        self.entries[test.id()] = ("failed", self._exc_info_to_string(err, test))


def _note(text: str) -> None:
    folder = os.environ.get("MPICOLL_TEST_FOLDER")
    if folder:
        (Path(folder) / f"rank-{RANK}.test").write_text(text)


def _import(names: list[str]) -> list[ModuleType]:
    """Import modules of tests as mpi4py's own runner does: without arrays on devices.

    One of them makes a call while it is imported, for which compiled code has to be loaded already.
    """
    compile_shared()
    hidden = {name: sys.modules.get(name) for name in ("cupy", "numba")}
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: it cannot be imported
    try:
        return [importlib.import_module(name) for name in names]
    finally:
        for name, module in hidden.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module


def _with_requests_of_mpicoll(module: ModuleType) -> None:
    """Let test_request's tests of one request, which are on mpi4py's null request, run on complete ones of mpicoll."""

    def started() -> Any:
        return MPI.COMM_WORLD.Iallreduce(MPI.IN_PLACE, np.zeros(3))

    def persistent() -> Any:
        request = MPI.COMM_WORLD.Allreduce_init(MPI.IN_PLACE, np.zeros(3))
        request.Start()
        return request

    for make in (started, persistent):

        def set_up(test: Any, make: Any = make) -> None:
            test.REQUEST, test.STATUS = make(), MPI.Status()
            test.REQUEST.Wait()

        name = f"TestRequest_{make.__name__}"
        made = type(name, (module.TestRequest,), {"setUp": set_up, "__module__": module.__name__})
        setattr(module, name, made)


def _with_requests_among_plain_ones(module: ModuleType) -> None:
    """Let test_request's tests of several null requests run with complete ones of mpicoll among them, too."""

    def set_up(test: Any) -> None:
        module.TestRequestArray.setUp(test)
        test.REQUESTS[1::2] = [MPI.COMM_WORLD.Ibarrier(), MPI.COMM_WORLD.Barrier_init()]
        test.REQUESTS[1].Wait()

    made = type("TestRequestArray_mixed", (module.TestRequestArray,), {"setUp": set_up, "__module__": module.__name__})
    module.TestRequestArray_mixed = made  # type: ignore[attr-defined]


def _with_subclasses(module: ModuleType) -> None:
    """Let test_comm_topo find that a handle is of the class that ours is derived from, not of the same class."""

    def check(test: Any, old: Any) -> None:
        for new in (MPI.Comm.fromint(old.toint()), MPI.Comm.f2py(old.py2f())):
            assert new == old
            assert isinstance(old, type(new))
            assert isinstance(old, mpicoll.Intracomm)

    module.BaseTestTopo.checkHandle = check


_CHANGES = {
    "test_request": (_with_requests_of_mpicoll, _with_requests_among_plain_ones),
    "test_comm_topo": (_with_subclasses,),
}


def _tests(suite: unittest.TestSuite) -> Any:
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from _tests(test)
        else:
            yield test


def main() -> None:
    folder, results, *names = sys.argv[1:]
    sys.dont_write_bytecode = True
    sys.path.insert(0, folder)
    for name in ("COMM_WORLD", "COMM_SELF"):
        setattr(MPI, name, mpicoll.Intracomm(getattr(MPI, name), timeout=TIMEOUT))
    outcomes, omitted = Outcomes(), {}
    suite = unittest.TestSuite()
    for module in _import(names):
        for change in _CHANGES.get(module.__name__, ()):
            change(module)
        for test in _tests(unittest.defaultTestLoader.loadTestsFromModule(module)):
            reason = left_out(test.id())
            if reason:
                omitted[test.id()] = reason
            else:
                suite.addTest(test)
    suite.run(outcomes)
    content = {"entries": outcomes.entries, "left_out": omitted, "seconds": outcomes.seconds}
    (Path(results) / f"rank-{RANK}.json").write_text(json.dumps(content))


main()
