"""The tables of the training benchmarks; that they train is seen by running them."""

import argparse
from types import SimpleNamespace

import pytest

from bench import async_modes, server, training
from bench.training_watch import Watch
from mpicoll.train.metrics import EpochRecord
from tests.bench.synthetic import row_cells


def test_strategies_are_compared_with_one_rank():
    outcomes = [
        training.Outcome("digits", "replicated", 1, 1000.0, 0.5, 0.98, 2_000_000, 0.0, [1.0, 0.5]),
        training.Outcome("digits", "int8", 2, 1500.0, None, 0.98, 1_000_000, 500_000.0, [1.0, 0.55]),
        training.Outcome("digits", training.TORCH, 2, 500.0),
    ]
    head, _, *rows = (row_cells(line) for line in training.table(outcomes, "digits").splitlines())
    assert head[:4] == ["digits", "samples/s, 1 rank", "samples/s, 2 ranks", "to 97%"]
    assert rows == [
        ["replicated", "1,000 (1.00)", "", "", "", "", "0e+00"],
        ["int8", "", "1,500 (1.50)", "", "1.00", "0.50", "1e-01"],
        ["PyTorch DDP", "", "500 (0.50)", "", "", "", ""],
    ]


def test_medians_over_launches_have_intervals():
    paces = (100, 80, 130, 90, 110, 120)
    outcomes = [training.Outcome("digits", "replicated", 1, pace, 0.01 * pace, losses=[1.0]) for pace in paces]
    outcomes += [training.Outcome("digits", "int8", 2, 2 * pace, pace if pace > 80 else None) for pace in paces]
    _, _, alone, two = (row_cells(line) for line in training.table(outcomes, "digits").splitlines())
    assert alone[1:4] == ["105 ±24% (1.00)", "", ""]
    assert two[1:4] == ["", "210 ±24% (2.00)", ""]  # not all reached the goal
    _, _, alone = (row_cells(line) for line in training.table(outcomes[:6], "digits").splitlines())
    assert alone[1:3] == ["105 ±24% (1.00)", "1.05 s ±24%"]


def test_steps_of_the_warm_up_do_not_count():
    coordination = SimpleNamespace(samples_seen=0)
    loop = SimpleNamespace(clock=SimpleNamespace(stepping=0.0), coordination=coordination, evaluate=lambda: (0.1, 0.99))
    watch = Watch()
    for step in range(1, training.WARMUP_STEPS + 11):
        loop.clock.stepping += 100.0 if step <= training.WARMUP_STEPS else 1.0
        coordination.samples_seen += 64
        watch.on_step(loop, step)
    watch.on_epoch(loop, EpochRecord(0, step, 0.1, 0.9, 0.1, 0.99, 1.0, 64.0))
    assert watch.seconds(loop) == watch.seconds_to_goal == 10
    assert watch.samples(loop) == 640
    assert all((task.steps or task.epochs * 20) > 2 * training.WARMUP_STEPS for task in training.TASKS.values())


def test_strategies_that_do_not_fit_are_left_out():
    names = {
        size: [name for name, _ in training.configurations("large", list(training.STRATEGIES), size)]
        for size in (1, 2, 4)
    }
    assert names[1] == ["replicated"]
    assert "tensor 2 pipeline 2" in names[4]
    assert "tensor 2 pipeline 2" not in names[2]


def outcome(part, mode, seed, accuracy, of_ideal=None, late=None):
    return async_modes.ModeOutcome(
        part, mode, seed, accuracy, 1000.0, of_ideal, late, late, 10.0, 20.0, [1.0], [accuracy]
    )


def test_modes_are_compared_with_synchronous_training():
    outcomes = [outcome("digits", "sync", seed, accuracy) for seed, accuracy in enumerate((0.98, 0.97, 0.99))]
    outcomes += [outcome("digits", "ps", seed, accuracy, late=3.0) for seed, accuracy in enumerate((0.97, 0.5, 0.99))]
    outcomes += [outcome("slow", "ps", 0, 0.9, of_ideal=0.9)]
    _, _, *rows = (row_cells(line) for line in async_modes.table(outcomes).splitlines())
    assert rows == [
        ["sync", "98.00% ±2.48", "+0.00 ±0.00", "1,000", "", "", "10", "20", "", ""],
        ["ps", "82.00% ±68.89", "-16.00 ±66.70", "1,000", "3.0", "3", "10", "20", "1,000", "90%"],
    ]


def test_what_all_workers_could_do_alone():
    arguments = argparse.Namespace(epochs=1, steps=10, step_seconds=0.01)
    config = async_modes.config_of("slow", "ps", 0, arguments)
    assert async_modes.ideal_samples_per_second(config, 8) == pytest.approx(6.2 / 0.01 * 64 / 7)


def test_the_drawing_has_two_panels(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "modes.svg"
    async_modes.draw(path, [outcome("digits", "sync", 0, 0.9), outcome("slow", "gossip", 0, 0.9, of_ideal=0.8)])
    assert path.read_text().count('id="axes_') == 2


@pytest.mark.parametrize("main", [training.main, async_modes.main, server.main])
def test_wrong_options_are_refused(main, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--bogus"])
    assert caught.value.code == 2
    assert "--bogus" in capsys.readouterr().err
