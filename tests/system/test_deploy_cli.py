"""Compression of models in fresh processes: a chain of commands, what is refused, and inference in a program."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
from pathlib import Path

import pytest

from bench import launch as mpirun
from tests.mpirun import Outcome, run

LOAD = """
import sys
import numpy as np
from mpicoll.deploy import load

runtime = load(sys.argv[1])
x = np.zeros((3, 64), np.float32)
assert runtime.logits(x).shape == (3, 10)
print(runtime.predict(x).tolist())
"""


def launch(size: int, *arguments: str) -> Outcome:
    done = run(size, arguments, timeout=120)
    assert not done.hung, done.text
    return done


def succeeded(done: Outcome) -> str:
    assert done.returncode == 0, done.text
    return done.stdout


def in_one_file(log: Path, size: int, *arguments: str) -> str:
    """Return all output of a launcher, as in a shell with ``> log 2>&1``."""
    command = mpirun.command(size, arguments)
    with log.open("w") as both:
        environment = mpirun.clean_environment()
        subprocess.run(command, env=environment, stdout=both, stderr=subprocess.STDOUT, check=True, timeout=120)
    return log.read_text()


def test_a_chain_of_commands(tmp_path: Path) -> None:
    runs, half, small = (str(tmp_path / name) for name in ("runs", "half.safetensors", "small.safetensors"))
    train = ("-m", "mpicoll.train", "--epochs", "4", "--hidden", "64,32", "--checkpoint", runs, "--quiet")
    succeeded(launch(2, *train))
    deploy = ("-m", "mpicoll.deploy")
    prune = ("--sparsity", "0.5", "--structured", "channels", "--epochs", "3")
    text = in_one_file(tmp_path / "log", 2, *deploy, "prune", runs, *prune, "-o", half)
    assert "step/s" not in text, "a progress bar stands before the table"
    assert re.search(r"^half\.safetensors +9\d\.\d\d% ", text, re.MULTILINE)
    result = tmp_path / "r.json"
    text = succeeded(launch(1, *deploy, "quantize", half, "-o", small, "--json", str(result)))
    found = json.loads(result.read_text())
    assert found["command"] == "quantize"
    assert [each["name"] for each in found["models"]] == ["half.safetensors", "small.safetensors"]
    assert found["models"][1]["nbytes"] < 0.35 * found["models"][0]["nbytes"]
    assert found["file_nbytes"] == Path(small).stat().st_size
    assert found["models"][1]["accuracy"] > 0.85
    assert re.fullmatch(r"\[\d, \d, \d\]\n", succeeded(launch(1, "-c", LOAD, small)))
    if importlib.util.find_spec("onnx") and importlib.util.find_spec("onnxruntime"):
        text = succeeded(launch(1, *deploy, "export", small, "-o", str(tmp_path / "small.onnx")))
        assert "onnxruntime: outputs of 359 samples differ by at most" in text
    page = tmp_path / "r.html"
    succeeded(launch(2, *deploy, "report", runs, half, small, "--html", str(page), "--quiet"))
    assert page.read_text().count("half.safetensors") == 2


WRONG = [
    ("evaluate missing.safetensors", 1, "missing.safetensors: cannot be read: No such file or directory"),
    ("prune missing.safetensors", 2, "the following arguments are required: --sparsity, -o/--output"),
]


@pytest.mark.parametrize(("words", "status", "reason"), WRONG, ids=[words for words, *_ in WRONG])
def test_errors_are_one_line_and_a_status(words: str, status: int, reason: str) -> None:
    done = launch(2, "-m", "mpicoll.deploy", *words.split())
    assert done.returncode == status
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, done.text
    assert reason in lines[0]
