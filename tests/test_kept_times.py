"""Ratios that runs keep for later ones."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mpicoll.shared_memory import cache_sharing, kept_times

SHAPE = (2, 3)
CACHES = [[1, 0]] * 4


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MPICOLL_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _keep(*values: float) -> None:
    for value in values:
        kept_times.add(CACHES, np.full(SHAPE, value))


def test_the_median_counts_once_there_are_enough(folder: Path) -> None:
    _keep(1.0, 9.0)
    assert kept_times.median(CACHES, SHAPE) is None
    _keep(2.0)
    np.testing.assert_array_equal(kept_times.median(CACHES, SHAPE), np.full(SHAPE, 2.0))
    assert kept_times.median([*CACHES, [1, 0]], SHAPE) is None
    assert kept_times.median(CACHES, (3, 2)) is None
    assert [path.suffix for path in folder.iterdir()] == [".json"]  # no draft is left


def test_what_is_no_ratio_is_not_kept() -> None:
    _keep(1.0, np.inf, np.nan, 0.0, -1.0, 2.0)
    assert kept_times.median(CACHES, SHAPE) is None
    _keep(3.0)
    np.testing.assert_array_equal(kept_times.median(CACHES, SHAPE), np.full(SHAPE, 2.0))


HUGE = '{"format": 1, "facts": %s, "ratios": [[1' + 400 * "0" + "]]}"


@pytest.mark.parametrize(
    "text", [HUGE, "", "{}", "[]", "[" * 60_000, "x" * 100_000, '{"format": 1, "facts": {}}', "\xff"]
)
def test_a_damaged_file_counts_as_none_and_is_replaced(folder: Path, text: str) -> None:
    _keep(1.0, 1.0, 1.0)
    (path,) = folder.iterdir()
    facts = json.dumps(json.loads(path.read_text())["facts"])
    path.write_text(text.replace("%s", facts), encoding="latin-1")
    assert kept_times.median(CACHES, SHAPE) is None
    _keep(2.0, 2.0, 2.0)
    np.testing.assert_array_equal(kept_times.median(CACHES, SHAPE), np.full(SHAPE, 2.0))


def test_ranks_that_share_other_caches_have_other_measurements() -> None:
    _keep(1.0, 1.0, 1.0)
    assert kept_times.median([[1, 0], [1, 0], [1, 1], [1, 1]], SHAPE) is None
    assert kept_times.median([[2, 0]] * 4, SHAPE) is None


def _machine(root: Path, caches: list[str]) -> None:
    """Write the files by which Linux tells the last-level caches of 16 cores."""
    for core in range(16):
        shared = next((text for text in caches if core in cache_sharing._numbers(text)), "")
        for level, text in enumerate([str(core), shared]):
            folder = root / f"sys/devices/system/cpu/cpu{core}/cache/index{level}"
            folder.mkdir(parents=True)
            (folder / "shared_cpu_list").write_text(text + "\n")


def test_last_level_caches(tmp_path: Path) -> None:
    _machine(tmp_path, ["0-3,8-11", "4-7,12-15"])
    assert cache_sharing.last_level_caches(range(16), tmp_path) == ["0-3,8-11", "4-7,12-15"]
    assert cache_sharing.last_level_caches([9, 2], tmp_path) == ["0-3,8-11"]
    assert cache_sharing.last_level_caches([99], tmp_path) == []
    assert cache_sharing.last_level_caches(range(4), tmp_path / "nothing") == []


def test_a_folder_that_cannot_be_written_is_no_error(folder: Path) -> None:
    folder.write_text("a file")
    _keep(1.0, 1.0, 1.0)
    assert kept_times.median(CACHES, SHAPE) is None
