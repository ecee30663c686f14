"""The table of training over slow links, and its command line."""

import json
from dataclasses import asdict

import pytest

from bench import cluster_training
from bench.cluster_training import ClusterOutcome, main, table

CURVES = {
    "dense": [[(10.0, 0.9), (20.0, 0.97), (30.0, 0.98)], [(10.0, 0.9), (20.0, 0.9), (30.0, 0.975)]],
    "sign": [[(1.0, 0.8), (2.0, 0.96), (3.0, 0.97)], [(1.0, 0.8), (2.0, 0.971), (3.0, 0.96)]],
    "gossip": [[(1.0, 0.8)], [(1.0, 0.99)]],
}


def test_medians_over_seeds_and_runs_that_do_not_get_there():
    outcomes = [
        ClusterOutcome(0.1, name, seed, 100.0, 2e6, curve)
        for name, curves in CURVES.items()
        for seed, curve in enumerate(curves)
    ]
    lines = table(outcomes, 0.97).splitlines()
    assert lines[1] == "0.1 Gbit/s, 2 seeds"
    rows = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]] for line in lines[5:]}
    assert rows["dense"] == ["25.0 s", "1.0", "2.5", "100", "2.00", "97.8%"]
    assert rows["sign"] == ["2.5 s", "10.0", "2.5", "100", "2.00", "96.5%"]
    assert rows["gossip"][:3] == ["not reached", "", ""]


def test_kept_outcomes_are_shown_again_with_a_table_for_each_delay(tmp_path, capsys):
    for number, delay in enumerate((0.0, 5e-3)):
        outcomes = [ClusterOutcome(1.0, "dense", 0, 100.0, 2e6, [(10.0 * (number + 1), 0.98)], delay, delay / 5)]
        (tmp_path / f"{number}.json").write_text(json.dumps([asdict(each) for each in outcomes]))
    assert main(["--read", str(tmp_path / "0.json"), str(tmp_path / "1.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "seed" in line] == ["1 Gbit/s, 1 seed", "1 Gbit/s, 5 ms delay ± 1 ms, 1 seed"]
    assert [line.split("|")[2].strip() for line in lines if line.startswith("| dense ")] == ["10.0 s", "20.0 s"]


@pytest.mark.parametrize("text", [None, "no JSON", '[{"gbit": 1}]'])
def test_files_without_outcomes_are_refused(text, tmp_path, capsys):
    if text is not None:
        (tmp_path / "a.json").write_text(text)
    with pytest.raises(SystemExit) as caught:
        main(["--read", str(tmp_path / "a.json")])
    assert caught.value.code == 2
    assert "a.json holds no outcomes" in capsys.readouterr().err


def test_every_configuration_is_one_of_the_trainers():
    from mpicoll.train.options import parse

    for options in cluster_training.CONFIGURATIONS.values():
        parse([*cluster_training.TASK, *options])


@pytest.mark.parametrize(
    "arguments", ["--seeds 0", "--goal 1.5", "--plot a.txt", "--rates 3", "--delay 5", "--configurations none"]
)
def test_wrong_arguments(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments.split())
    assert caught.value.code == 2
    assert arguments.split()[0] in capsys.readouterr().err
