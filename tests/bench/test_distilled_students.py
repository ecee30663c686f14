"""Choice of settings and table of bench.distilled_students."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from bench import distilled_students
from bench.distilled_students import ALONE, LARGE, StudentOutcome, best_setting
from mpicoll import Intracomm
from mpicoll.data.datasets import load
from mpicoll.train.config import TrainConfig


def outcome(kind: str, setting: str, seed: int, validation: float, test: float) -> StudentOutcome:
    return StudentOutcome("digits", kind, setting, seed, 100 if kind == LARGE else 20, validation, test)


OUTCOMES = [
    *(outcome(LARGE, "", seed, 0.97, 0.96) for seed in (0, 1)),
    *(outcome(ALONE, "40 epochs", seed, 0.90, 0.90) for seed in (0, 1)),
    outcome("distilled", "T = 1", 0, 0.91, 0.99),
    outcome("distilled", "T = 1", 1, 0.91, 0.99),
    outcome("distilled", "T = 2", 1, 0.99, 0.93),
    outcome("distilled", "T = 2", 0, 0.89, 0.91),
]


def test_settings_are_chosen_by_all_seeds_and_not_by_test_samples() -> None:
    found = best_setting(OUTCOMES, "distilled")
    assert [(each.setting, each.seed) for each in found] == [("T = 2", 0), ("T = 2", 1)]


def test_gains_are_those_of_equal_seeds() -> None:
    cells = [cell.strip() for cell in distilled_students.table(OUTCOMES)[2].strip("|").split("|")]
    assert cells[:4] == ["digits", "96.00%", "90.00%", "92.00%"]
    assert cells[4] == "+2.00 ± 12.71 (+1.00 to +3.00)"
    assert cells[5:] == ["20%", "T = 2; alone 40 epochs"]


def test_no_sample_is_in_two_parts() -> None:
    whole = load(TrainConfig(dataset="digits", seed=3), Intracomm(MPI.COMM_SELF))
    fit, validation = distilled_students._parts(whole, 3)

    def rows(samples: object) -> list[bytes]:
        x, _ = samples.batch(np.arange(samples.count))
        return [row.tobytes() for row in x]

    parts = [rows(part) for part in (fit.train, validation.test, whole.test)]
    assert sorted(parts[0] + parts[1]) == sorted(rows(whole.train))
    assert fit.test is whole.test
    assert len(parts[1]) == round(0.25 * whole.train.count)
