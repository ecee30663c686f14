"""Run tests of PyTorch on the ranks of MPI, in place of processes that they would start; see :mod:`records`."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import traceback
import unittest
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from mpicoll.consensus import share, wait_politely
from tests.torch_conformance.records import FAILED, PASSED, SKIPPED, WORLD, run_all

SECONDS = 20.0
FEATURES = ("plugin", "ddp")


def load() -> tuple[Any, str]:
    """Import PyTorch's tests with the variables that they read; return their class and a folder."""
    made = {"path": tempfile.mkdtemp(prefix="mpicoll-torch-")} if WORLD.rank == 0 else None
    folder = share(WORLD, made)["path"]
    os.environ.update(BACKEND="mpicoll", WORLD_SIZE=str(WORLD.size), TEMP_DIR=folder)
    for name in ("barrier", "init_dir", "test_dir"):
        (Path(folder) / name).mkdir(exist_ok=True)
    from torch.testing._internal.common_distributed import DistTestCases

    for feature in FEATURES:
        DistTestCases.backend_feature[feature].add("mpicoll")
    from torch.testing._internal.distributed import distributed_test

    class Tests(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        """The tests, on the ranks of MPI."""

        def _barrier(self, *args: Any, **kwargs: Any) -> None:
            wait_politely(WORLD)

    return Tests, folder


def run_one(tests: Any, name: str) -> tuple[str, str]:
    """Run a test in a default group of its own; return how it ended on this rank, and why."""
    import torch
    import torch.distributed as dist

    function = getattr(tests, name)
    if getattr(function, "__unittest_skip__", False):  # which unittest would look at
        return SKIPPED, function.__unittest_skip_why__
    torch.manual_seed(0)
    dist.init_process_group("mpicoll", timeout=timedelta(seconds=SECONDS))
    try:
        case = tests(name)
        case.rank, case.file_name = WORLD.rank, os.environ["TEMP_DIR"] + "/file"
        case.skip_return_code_checks, case.special_return_code_checks = [], {}
        getattr(case, name)()
    except unittest.SkipTest as reason:
        return SKIPPED, str(reason)
    except SystemExit as reason:
        return _exit(reason.code)
    except BaseException:
        return FAILED, traceback.format_exc()[-3000:]
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return PASSED, ""


def _exit(code: Any) -> tuple[str, str]:
    """Return what an exit status of PyTorch's tests means."""
    from torch.testing._internal.common_distributed import TEST_SKIPS

    if code in (0, None):
        return PASSED, ""
    reason = next((each.message for each in TEST_SKIPS.values() if each.exit_code == code), "")
    return (SKIPPED, reason) if reason else (FAILED, f"exit status {code}")


def main() -> None:
    import mpicoll.torch  # noqa: F401

    tests, folder = load()
    import torch

    torch.set_num_threads(1)
    pattern, out = re.compile(sys.argv[1]), Path(sys.argv[2])
    names = [name for name in unittest.TestLoader().getTestCaseNames(tests) if pattern.search(name)]
    run_all(names, partial(run_one, tests), out)
    if WORLD.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
