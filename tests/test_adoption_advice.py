"""The sentence of a profile says what was measured, and no more."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpicoll.program import library_comparison
from mpicoll.program.adoption_advice import Advice, advise
from mpicoll.program.library_comparison import Comparison
from mpicoll.program.profile_analysis import Analysis, Target


def advice(used: float, waited: float, ours: float | None, library: float | None, **facts: Any) -> Advice:
    """Ask for 1000 calls on two ranks, of a program that takes 10 s."""
    target = Target((0, 1), (1, 0), 0, "Allreduce", 8, "d", "", 0, calls=1000, transfer=2 * (used - waited))
    analysis = Analysis([], [target], np.array([used, used]), np.array([waited, waited]))
    known = {"mode": "mpicoll", "ranks": 2, "wall_seconds": 10.0, "crowded": False, "compare_seconds": 5.0}
    return advise(analysis, [Comparison(target, ours, library)], {**known, **facts})


@pytest.mark.parametrize(
    ("numbers", "facts", "verdict", "says"),
    [
        ((0.1, 0.0, 1e-4, 2e-4), {}, "no", "Collectives take 1.0% of the program's time"),
        ((3.0, 2.9, 1e-4, 1.1e-4), {}, "no", "waits for the slowest rank during 97%"),
        ((2.0, 0.0, None, None), {}, "unknown", "Too few of the calls could be measured again to tell"),
        ((2.0, 0.0, None, None), {"compare_seconds": 0.0}, "unknown", "was not measured (--compare 0)."),
        ((2.0, 0.0, 2e-3, 4e-3), {"crowded": True}, "unknown", "more ranks than cores"),
        ((2.0, 0.0, 2e-3, 2.1e-3), {}, "no", "It makes no difference"),
        ((2.0, 0.0, 2e-3, 4e-3), {}, "yes", "with the MPI library alone the program would take about 20% more time"),
        ((2.0, 0.0, 1e-3, 2e-3), {"mode": "native"}, "yes", "with mpicoll the program would take about 10% less time"),
        ((2.0, 0.0, 2e-3, 1e-3), {}, "no", "with the MPI library alone the program would take about 10% less time"),
        ((2.0, 0.0, 2e-4, 8e-4), {}, "yes", "In the program the calls took 10.0 times as long"),
        ((2.0, 0.0, 2e-3, 4e-3), {"ranks": 1}, "unknown", "One rank has nobody"),
    ],
)
def test_the_sentence(numbers: tuple[Any, ...], facts: dict[str, Any], verdict: str, says: str) -> None:
    found = advice(*numbers, **facts)
    assert found.verdict == verdict, found
    assert says in found.sentence


def test_the_sentence_says_where_more_time_would_help() -> None:
    targets = [Target((0, 1), (1, 0), place, "Allreduce", 8, "d", "", 0, calls=9, transfer=1.0) for place in range(5)]
    facts = {"mode": "mpicoll", "ranks": 2, "wall_seconds": 10.0, "crowded": False, "compare_seconds": 0.1}
    found = advise(
        Analysis([], targets, np.array([2.5, 2.5]), np.zeros(2)), [Comparison(targets[0], 1e-3, 2e-3)], facts
    )
    assert (found.verdict, found.gain_seconds) == ("unknown", None)
    assert "in 0.1 s" in found.sentence
    assert found.sentence.endswith(": raise --compare.")


@pytest.mark.parametrize("dtype", ["V", "S", "U", "O", "nothing"])
def test_calls_on_other_than_numbers_are_not_repeated(dtype: str) -> None:
    """A profile knows the kind of their elements only, which has no size."""
    signature = SimpleNamespace(holds_objects=False)
    target = Target((0, 1), (1, 0), 0, "Bcast", 96, dtype, "", 0)
    assert library_comparison._repeat(target, SimpleNamespace(signature=signature, sample=None)) is None  # type: ignore[arg-type]
