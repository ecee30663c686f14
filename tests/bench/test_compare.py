"""A slower algorithm is found, chance is not."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from bench import compare, intervals, result_files
from bench.result_files import BACK_TO_BACK, SINGLE, UNTOUCHED, WRITTEN, ResultSet
from tests.bench import synthetic

SLOWED = {**synthetic.PACE, "ring": 1.3 * synthetic.PACE["ring"]}


def save(folder: Path, runs: Iterable[ResultSet]) -> str:
    for run in runs:
        result_files.save_in(folder, run)
    return str(folder)


@pytest.mark.parametrize("launches", [1, 3])
def test_a_slowed_algorithm_is_flagged(launches: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = save(tmp_path / "a", (synthetic.run(seed) for seed in range(launches)))
    after = save(tmp_path / "b", (synthetic.run(50 + seed, pace=SLOWED) for seed in range(launches)))
    assert compare.main([before, after, "--json", str(tmp_path / "all.json")]) == 1
    out = capsys.readouterr().out
    slower = out[out.index("slower:") :]
    assert "ring" in slower
    assert not [line for line in slower.splitlines() if " tree " in line or " plan " in line]
    flagged = [row for row in json.loads((tmp_path / "all.json").read_text()) if row["beyond_noise"]]
    assert {row["contender"] for row in flagged} == {"ring"}
    assert compare.main([after, before]) == 0  # faster is no failure


def test_the_same_code_passes(tmp_path: Path) -> None:
    alarms = 0
    for seed in range(12):
        runs = [[synthetic.run(1000 * seed + 10 * side + n, launch_noise=0.06) for n in range(3)] for side in (0, 1)]
        every = compare.changes(*(intervals.collect(side) for side in runs))
        alarms += bool(compare.beyond_noise(every, 0.05))
    assert alarms <= 3


def test_the_machine_s_pace_cancels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [synthetic.run(seed) for seed in range(3)]
    slow = [
        dataclasses.replace(run, results=[dataclasses.replace(r, samples=r.samples * 2) for r in run.results])
        for run in (synthetic.run(seed, cpu="another") for seed in range(3, 6))
    ]
    assert compare.main([save(tmp_path / "a", runs), save(tmp_path / "b", slow)]) == 0
    out = capsys.readouterr().out
    assert "the baselines' own times changed by +9" in out or "changed by +10" in out
    assert "cpu differs" in out


def test_small_changes_do_not_count(tmp_path: Path) -> None:
    pace = {**synthetic.PACE, "ring": 1.03 * synthetic.PACE["ring"]}
    before = save(tmp_path / "a", (synthetic.run(seed, launch_noise=0.0) for seed in range(5)))
    after = save(tmp_path / "b", (synthetic.run(90 + seed, launch_noise=0.0, pace=pace) for seed in range(5)))
    assert compare.main([before, after, "--threshold", "10%"]) == 0
    assert compare.main([before, after, "--threshold", "1%"]) == 1


def test_bad_input_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = save(tmp_path / "a", [synthetic.run(1)])
    other = save(tmp_path / "b", [synthetic.run(1, library="another")])
    assert compare.main([good, str(tmp_path / "missing")]) == 2
    assert "missing" in capsys.readouterr().err
    assert compare.main([good, other]) == 2
    assert "nothing was measured in both" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        compare.main([good, good, "--threshold", "much"])


def test_what_calls_were_made_in_another_manner_is_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = save(tmp_path / "a", [synthetic.run(1, manner=(BACK_TO_BACK, UNTOUCHED))])
    single = synthetic.run(2, manner=(SINGLE, WRITTEN))
    new = save(tmp_path / "b", [synthetic.run(1), single])
    assert compare.main([old, new]) == 2
    said = capsys.readouterr().err
    assert "before with back to back, send buffers untouched; after with back to back, send buffers written" in said
    assert "see --calls and --buffers" in said
    both = save(tmp_path / "c", [synthetic.run(3), synthetic.run(4, manner=(BACK_TO_BACK, UNTOUCHED))])
    assert compare.main([both, new, "--threshold", "900%"]) == 0
    out = capsys.readouterr().out
    assert "only what was measured after has: single calls, send buffers written" in out
    assert "only what was measured before has: back to back, send buffers untouched" in out


def test_other_baselines_are_not_compared(tmp_path: Path) -> None:
    pace = {**synthetic.PACE, "native persistent": 0.9}
    runs = [intervals.collect([synthetic.run(seed, pace=pace)]) for seed in (1, 2)]
    assert {change.key.contender for change in compare.changes(*runs)} == {"auto", "plan", "ring", "tree"}
