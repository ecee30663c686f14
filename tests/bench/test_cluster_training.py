"""The table of training over slow links, and its command line."""

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


def test_every_configuration_is_one_of_the_trainers():
    from mpicoll.train.options import parse

    for options in cluster_training.CONFIGURATIONS.values():
        parse([*cluster_training.TASK, *options])


@pytest.mark.parametrize("arguments", ["--seeds 0", "--goal 1.5", "--plot a.txt", "--rates 3", "--configurations none"])
def test_wrong_arguments(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments.split())
    assert caught.value.code == 2
    assert arguments.split()[0] in capsys.readouterr().err
