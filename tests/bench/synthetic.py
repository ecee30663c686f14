"""Results as if they had been measured, with noise of known size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from bench.result_files import BACK_TO_BACK, WRITTEN, Case, Result, ResultSet

SIZES = tuple(8 * 4**power for power in range(10))
PACE = {"native": 1.0, "auto": 0.5, "plan": 0.2, "ring": 1.4, "tree": 1.2}


def run(
    seed: int,
    size: int = 2,
    launch_noise: float = 0.04,
    pace: Mapping[str, float] = PACE,
    manner: tuple[str, str] = (BACK_TO_BACK, WRITTEN),
    **metadata: Any,
) -> ResultSet:
    """Return one launch: samples scatter in bursts, and each contender's launch has a pace of its own."""
    random = np.random.default_rng(seed)
    results = []
    for nbytes in SIZES:
        common = _bursts(random)
        for name, factor in pace.items():
            own = _bursts(random) * np.exp(random.normal(0, launch_noise))
            samples = factor * (2e-6 * size + nbytes / 5e9) * common * own
            detail = {"choice": "shared"} if name == "auto" else {}
            case = Case("allreduce", nbytes, nbytes // 4, "float32", size, "", *manner)
            results.append(Result(case, name, samples, 10, 0, detail))
    facts = {"library": "MPICH 5", "thread_level": "multiple", "setting": "", "cores": 2, "ranks": size}
    return ResultSet("bench.collectives", {**facts, "warnings": [], **metadata}, results)


def _bursts(random: np.random.Generator) -> np.ndarray:
    noise = np.convolve(random.normal(0, 0.1, 44), np.ones(5) / 5, "valid")
    noise[random.random(40) < 0.03] += 1.0
    return np.exp(noise)


def row_cells(line: str) -> list[str]:
    """Return the cells of a line of Markdown."""
    return [cell.strip() for cell in line.strip("|").split("|")]
