"""Tables of bench.deployment, and commands that its methods name."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest

from bench import deployment
from mpicoll.deploy.deploy_options import parse_deploy


def outcome(seed: int, accuracy: float, original: float) -> deployment.MethodOutcome:
    return deployment.MethodOutcome("digits", "8 bits", seed, accuracy, original, 0.25, 0.5, 0.75)


def test_a_row_has_the_median_and_the_range() -> None:
    rows = [outcome(0, 0.97, 0.98), outcome(1, 0.99, 0.98), outcome(2, 0.96, 0.98)]
    lines = deployment.table(rows, "digits")
    assert len(lines) == 4
    cells = [cell.strip() for cell in lines[3].strip("|").split("|")]
    assert cells == ["8 bits", "97.00%", "+1.00 (-1.00 to +2.00)", "25.0%", "0.50", "0.75x"]


@pytest.mark.parametrize("method", deployment.METHODS)
def test_methods_are_commands_on_models_that_are_there_by_then(method: str) -> None:
    names, command = list(deployment.METHODS), deployment.METHODS[method]
    more = ["--hidden", "3"] if command[0] == "distill" else []
    assert parse_deploy([*command, *more, "-o", "x.safetensors"]).command == command[0]
    read = [word for word in command if word in names]
    assert all(names.index(word) < names.index(method) for word in read)


def test_outcomes_are_written(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    deployment._write([outcome(0, 0.97, 0.98)], Namespace(json=path))
    assert json.loads(path.read_text())[0]["method"] == "8 bits"
