"""The command on one rank, without a launcher."""

import csv
import itertools
import json
import subprocess
import sys

import numpy as np
import pytest

from mpicoll.train import run_report
from tests import extent


def train(*options, timeout=120):
    command = [sys.executable, "-m", "mpicoll.train", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def test_json_and_step_log_hold_the_run(tmp_path):
    done = train(*"--epochs 2 --batch 100 --quiet --json r.json --log-steps s.csv".replace(" r.", f" {tmp_path}/r.")
                 .replace(" s.", f" {tmp_path}/s.").split())  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    result = json.loads((tmp_path / "r.json").read_text())
    assert 0.5 < result["test_accuracy"] <= 1
    assert [epoch["steps"] for epoch in result["epochs"]] == [15, 30]
    assert result["epochs"][1]["train_loss"] < result["epochs"][0]["train_loss"]
    assert result["epochs"][1]["test_accuracy"] == result["test_accuracy"]
    assert result["ranks"] == 1
    assert result["steps"] == 30
    assert len(result["parameters_sha256"]) == 64
    assert result["samples_per_second"] > 0
    assert 0 < result["seconds_to_first_step"] < 120
    assert 0 <= result["communication_share"] <= 1
    assert result["config"]["batch"] == 100
    assert result["versions"]["mpi_library"]
    rows = list(csv.DictReader((tmp_path / "s.csv").read_text().splitlines()))
    assert [int(row["step"]) for row in rows] == list(range(30))
    assert [int(row["epoch"]) for row in rows] == [0] * 15 + [1] * 15
    assert sum(1 for _ in tmp_path.iterdir()) == 2
    weights = [100] * 14 + [38]
    losses = [float(row["loss"]) for row in rows]
    assert result["epochs"][0]["train_loss"] == pytest.approx(np.average(losses[:15], weights=weights), rel=1e-12)


CASES = itertools.product(("float64", "float32"), ("mlp", "logistic", "conv"))


@pytest.mark.parametrize(("dtype", "model"), extent.first(3, list(CASES)))
def test_every_model_learns(tmp_path, model, dtype):
    path = tmp_path / "r.json"
    options = f"--model {model} --dtype {dtype} --epochs 4 --quiet --json {path}"
    assert train(*options.split()).returncode == 0
    assert json.loads(path.read_text())["test_accuracy"] > 0.9


def test_summary_and_progress_bar_are_apart():
    done = train("--epochs", "1")
    assert done.returncode == 0
    assert "test accuracy" in done.stdout
    assert "time by phase" in done.stdout
    assert "23/23" in done.stderr
    assert train("--epochs", "1", "--no-progress").stderr == ""


def test_a_progress_bar_goes_to_no_file(tmp_path):
    command = [sys.executable, "-m", "mpicoll.train", "--epochs", "1"]
    for error in (tmp_path / "error", tmp_path / "output"):
        with (tmp_path / "output").open("w") as out, error.open("w") as err:
            assert subprocess.run(command, stdout=out, stderr=err, timeout=120, check=False).returncode == 0
        assert "test accuracy" in (tmp_path / "output").read_text()
        assert "23/23" not in error.read_text()
    joined = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120, check=False)
    assert b"test accuracy" in joined.stdout
    assert b"23/23" not in joined.stdout


def test_same_seed_gives_the_same_bits(tmp_path):
    hashes = []
    for name in "ab":
        train("--epochs", "1", "--quiet", "--json", str(tmp_path / name))
        hashes.append(json.loads((tmp_path / name).read_text())["parameters_sha256"])
    assert hashes[0] == hashes[1]


def test_without_test_samples_there_is_no_accuracy(tmp_path):
    done = train("--epochs", "1", "--test-fraction", "0", "--no-progress", "--json", str(tmp_path / "r"))
    assert "no test samples" in done.stdout
    assert json.loads((tmp_path / "r").read_text())["test_accuracy"] is None


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        ("--hidden 3 --model conv", 2, "--hidden is for --model mlp"),
        ("--algorithm nonsense", 2, "nonsense"),
        ("--algorithm dissemination", 2, "'dissemination' is not one of"),
        ("--trace x.png", 2, "--trace x.png: the file is written as JSON; name it *.json, not *.png"),
        ("--log-steps x.JSON", 2, "--log-steps x.JSON: the file is written as CSV; name it *.csv, not *.json"),
        ("--json /nowhere/r.json", 2, "--json /nowhere/r.json: cannot write this file"),
        ("--dataset nowhere", 1, "nowhere"),
        ("--dataset nowhere.npz", 1, "--dataset nowhere.npz: there is no such file"),
        ("--dataset synthetic:50x7 --model conv", 1, "needs images"),
        ("--lr 1e30", 1, "the loss became"),
        ("--checkpoint /dev/null", 2, "error: --checkpoint /dev/null: is not a folder"),
        ("--checkpoint /no/where/x", 2, "error: --checkpoint /no/where/x: there is no folder /no/where to make it in"),
    ],
)
def test_errors_are_one_line(options, status, message):
    done = train("--no-progress", *options.split())
    assert done.returncode == status
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version(option):
    done = train(option)
    assert (done.returncode, done.stderr) == (0, "")
    assert "mpicoll" in done.stdout


@pytest.mark.parametrize(
    ("taken", "text"),
    [([46, 46], "workers took 46 steps each"), ([3, 46], "workers took 3 to 46 steps,"), ([0, 1], "took 1 step,")],
)
def test_steps_of_workers_are_told_in_words(taken, text):
    result = {"mode": {"steps_by_rank": taken, "steps_per_second": 1.0}}
    assert text in run_report._mode({**result, "config": {"mode": "gossip", "pull_compression": None}})
