"""Random operations on all kinds of communicators and memory; `make soak` goes on for as long as wanted."""

from __future__ import annotations

import os
import secrets

import pytest

from tests import extent, mpirun
from tests.mixture.__main__ import operations, run

SECONDS = float(os.environ.get("MPICOLL_TEST_MIXTURE_SECONDS", "6"))
FIRST = (
    (2, "default", 2, 1),
    (3, "default", 1, None),
    (8, "default", 1, 2),
    (5, "stopped ranks", 1, 3),
    (4, "no segments", 1, None),
    (3, "driver thread", 2, None),
)
SECOND = (
    (3, "default", 1, None),
    (3, "stopped ranks", 2, None),
    (4, "pretended nodes", 1, None),
    (5, "messages only", 1, 4),
)
RUNS = sorted({*FIRST, *SECOND}, key=str) if extent.ALL else SECOND if extent.SECOND_LIBRARY else FIRST
"""Ranks, variant, threads, and a seed; None for another one each time."""


@pytest.mark.parametrize(("ranks", "variant", "threads", "seed"), RUNS)
def test_every_element_is_right(ranks: int, variant: str, threads: int, seed: int | None) -> None:
    drawn = secrets.randbelow(1 << 30) if seed is None else seed
    outcome = run(ranks, SECONDS, drawn, variant, threads)
    assert operations(outcome) > 0, f"seed {drawn}\n{outcome.text}"


WRONG = """
import numpy as np
from mpicoll import Intracomm
from tests.mixture import program

allreduce = Intracomm.Allreduce


def wrong(self, sendbuf, recvbuf, *arguments, **settings):
    allreduce(self, sendbuf, recvbuf, *arguments, **settings)
    if self.rank == 1 and isinstance(recvbuf, np.ndarray) and recvbuf.size > 100:
        recvbuf[57] += 1


Intracomm.Allreduce = wrong
program.main(["--seconds", "20", "--seed", "1", "--threads", "1"])
"""


def test_a_single_wrong_element_is_found_and_named() -> None:
    outcome = mpirun.run(2, ["-c", WRONG], timeout=120)
    assert outcome.returncode != 0
    assert "1 of" in outcome.text
    assert "element 57 is" in outcome.text
    assert "its last operations" in outcome.text
