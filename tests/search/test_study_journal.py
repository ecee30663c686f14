"""Journal of a study: what is written when, and what another process reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

optuna = pytest.importorskip("optuna")

from mpicoll.errors import UsageError  # noqa: E402
from mpicoll.search.coordinator import StudyCoordinator  # noqa: E402
from mpicoll.search.study_settings import StudySettings  # noqa: E402
from mpicoll.search.study_storage import journal, open_study  # noqa: E402


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n")


def as_others_read(path: Path) -> Any:
    """Return the trials as Optuna's own backend reads them."""
    backend = optuna.storages.journal.JournalFileBackend(str(path))
    return optuna.load_study(study_name="study", storage=optuna.storages.JournalStorage(backend)).trials


def test_a_block_is_written_at_its_end(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with journal(str(path)) as storage:
        study = open_study(storage, StudySettings(sampler="random"))
        before = lines(path)
        with storage.together(sync=False):
            trial = study.ask()
            trial.suggest_float("x", 0, 1)
            trial.report(0.5, 1)
            assert lines(path) == before
        assert lines(path) == before + 3
        study.tell(trial, 1.0)
        assert lines(path) == before + 4
        own = study.trials
    assert own == as_others_read(path)
    with journal(str(path)) as storage:
        assert open_study(storage, StudySettings(sampler="random")).trials == own


def test_what_came_before_an_error_is_written(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with journal(str(path)) as storage:
        study = open_study(storage, StudySettings(sampler="random"))

        def fail() -> None:
            with storage.together(sync=True):
                study.ask()
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()
    assert len(as_others_read(path)) == 1


def coordinator(study: Any, storage: Any) -> StudyCoordinator:
    return StudyCoordinator(study, 2, [0, 2], lambda record: None, storage.together)


def end(value: float, reports: list[tuple[float, int]]) -> dict[str, Any]:
    ended = {"state": "complete", "value": value, "reason": "", "attributes": {"a": 1}, "reports": reports}
    return {"do": "end", "with": ended}


@pytest.mark.parametrize("pruner", ["none", "median"])
def test_the_end_of_a_trial_hands_out_the_next_one(tmp_path: Path, pruner: str) -> None:
    path = tmp_path / "journal"
    with journal(str(path)) as storage:
        hub = coordinator(open_study(storage, StudySettings(sampler="random", pruner=pruner)), storage)
        decides = pruner != "none"
        assert hub.handle(0, {"do": "next"}) == {"number": 0, "decides": decides}
        assert hub.handle(0, {"do": "reports", "with": {"values": [(0.5, 1), (0.4, 2)]}}) == {"prune": False}
        assert hub.handle(0, end(0.3, [(0.3, 3)])) == {"number": 1, "decides": decides}
        assert hub.handle(2, {"do": "next"}) == {"wait": True}
        assert hub.handle(0, end(0.2, [])) == {"end": True}
        assert not hub.all_dismissed()
        assert hub.handle(2, {"do": "next"}) == {"end": True}
        assert hub.all_dismissed()
    trials = as_others_read(path)
    assert [trial.intermediate_values for trial in trials] == [{1: 0.5, 2: 0.4, 3: 0.3}, {}]
    assert [trial.value for trial in trials] == [0.3, 0.2]
    assert trials[0].user_attrs["a"] == 1


def test_a_request_without_reply_dismisses_nobody(tmp_path: Path) -> None:
    with journal(str(tmp_path / "journal")) as storage:
        hub = coordinator(open_study(storage, StudySettings()), storage)
        hub.failure = "the disk is full"
        posted = {"do": "reports", "with": {"values": []}, "quiet": True}
        for leader in (0, 2):
            assert hub.handle(leader, posted) == {"failed": "the disk is full"}
        assert not hub.all_dismissed()
        for leader in (0, 2):
            hub.handle(leader, {"do": "next"})
        assert hub.all_dismissed()


def test_a_study_goes_on_with_the_same_facts_only(tmp_path: Path) -> None:
    path = str(tmp_path / "journal")
    facts = {"metric": "test_loss", "trainer": "--epochs 2"}
    with journal(path) as storage:
        open_study(storage, StudySettings(facts=facts))
        open_study(storage, StudySettings(facts=facts))
        with pytest.raises(
            UsageError, match=r"'study' in it has other trials: trainer was .*; --study NAME begins another"
        ):
            open_study(storage, StudySettings(storage=path, facts={**facts, "trainer": "--epochs 1"}))
        open_study(storage, StudySettings(name="other", facts={**facts, "trainer": "--epochs 1"}))
    with journal(path) as storage, pytest.raises(UsageError, match="metric was 'test_loss'"):
        open_study(storage, StudySettings(storage=path, facts={**facts, "metric": "train_loss"}))
