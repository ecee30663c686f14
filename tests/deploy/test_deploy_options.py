"""Command lines of python -m mpicoll.deploy."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mpicoll.deploy.deploy_options import COMMANDS, parse_deploy
from mpicoll.deploy.deploy_output import check_outputs, table_of
from mpicoll.deploy.evaluation import Evaluation
from mpicoll.errors import UsageError
from mpicoll.train.options import HelpRequested

OUT = ["-o", "x.safetensors"]


@pytest.mark.parametrize("words", [[], ["--help"], *([name, "--help"] for name in COMMANDS)])
def test_every_command_has_help(words: list[str]) -> None:
    with pytest.raises(HelpRequested, match=r"usage: .*python -m mpicoll.deploy"):
        parse_deploy(words)


def test_options_are_read() -> None:
    found = parse_deploy(["prune", "runs", "--sparsity", "0.9", "--scope", "layer", *OUT, "--seed", "4"])
    assert (found.command, found.models, found.output, found.data) == ("prune", ("runs",), "x.safetensors", {"seed": 4})
    found = parse_deploy(["evaluate", "runs", "--dataset", "x.csv", "--target", "label"])
    assert found.data == {"dataset": "x.csv", "target": ("label",)}


def test_options_of_the_command_are_read() -> None:
    found = parse_deploy(["prune", "runs", "--sparsity", "0.9", "--scope", "layer", *OUT])
    assert (found.chosen["sparsity"], found.chosen["scope"], found.chosen["epochs"]) == (0.9, "layer", 20)


WRONG = [
    (["squeeze"], "'squeeze' is not a command; commands are evaluate"),
    (["evaluate"], "evaluate takes one MODEL, not 0"),
    (["evaluate", "a", "b"], "evaluate takes one MODEL, not 2"),
    (["report"], "at least one MODEL"),
    (["prune", "a", *OUT], "--sparsity"),
    (["prune", "a", "--sparsity", "1", *OUT], "'1' is not a number above 0 below 1"),
    (["prune", "a", "--sparsity", "nan", *OUT], "'nan' is not a number"),
    (["prune", "a", "--sparsity", "0.5"], "-o/--output"),
    (["prune", "a", "--sparsity", "0.5", "-o", "x.bin"], "must end in .safetensors"),
    (["export", "a", *OUT], "must end in .onnx"),
    (["quantize", "a", "--weights", "int3", *OUT], "int3"),
    (["quantize", "a", "--calibrate", "0", *OUT], "at least 1"),
    (["evaluate", "a", "--seed", "9" * 20], f"--seed: '{'9' * 20}' is too large, with more than 18 digits"),
    (["quantize", "a", "--percentile", "50", *OUT], "above 50"),
    (["lowrank", "a", *OUT], "either --rank or --energy"),
    (["lowrank", "a", "--rank", "3", "--energy", "0.9", *OUT], "either --rank or --energy"),
    (["distill", "--teacher", "a", *OUT], "--hidden is needed"),
    (["distill", "--teacher", "a", "--model", "conv", "--hidden", "3", *OUT], "--hidden is needed with --model mlp"),
    (["distill", "--teacher", "a", "--model", "alexnet", *OUT], "invalid choice: 'alexnet'"),
    (["distill", "--teacher", "a", "--hidden", "3,0", *OUT], "'3,0' is not a list of widths"),
    (["distill", "--teacher", "a", "--hidden", "3", "--temperature", "0", *OUT], "above 0"),
    (["distill", "--teacher", "a", "--hidden", "3", "--epochs", "0", *OUT], "--epochs 0"),
    (["evaluate", "a", "--labels", "y.npy"], "--labels is for"),
    (["evaluate", "a", "--dataset", "x.npy"], "needs --labels"),
    (["evaluate", "a", "--target", "y"], "--target y is for a --dataset FILE.csv or FILE.parquet"),
    (["evaluate", "a", "--dataset", "digits", "--target", "y"], "--target y is for a --dataset FILE.csv"),
    (["evaluate", "a", "--dataset", "x.csv", "--target", "y,y"], "'y,y' is not a list of different names"),
    (["evaluate", "a", "--dataset", "synthetic:x"], "not of the form"),
    (["evaluate", "a", "--sparsity", "0.5"], "unrecognized arguments"),
]


@pytest.mark.parametrize(("words", "reason"), WRONG, ids=[" ".join(words) for words, _ in WRONG])
def test_wrong_options_are_refused(words: list[str], reason: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_deploy(words)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("link", [None, "symlink_to", "hardlink_to"])
@pytest.mark.parametrize(
    "words",
    [
        "quantize {input} -o {output}",
        "prune {input} --sparsity 0.5 -o {output}",
        "lowrank {input} --rank 2 -o {output}",
        "distill --teacher {input} --hidden 8 -o {output}",
        "evaluate x --original {input} --json {output}",
        "evaluate {input} --json {output}",
        "report x {input} --html {output}",
    ],
)
def test_an_output_never_replaces_an_input(tmp_path: Path, words: str, link: str | None) -> None:
    model = tmp_path / "model.safetensors"
    model.write_bytes(b"x")
    output = tmp_path / "folder" / ".." / "model.safetensors"
    (tmp_path / "folder").mkdir()
    if link is not None:
        output = tmp_path / "other.safetensors"
        getattr(output, link)(model)
    options = parse_deploy(words.format(input=model, output=output).split())
    with pytest.raises(UsageError, match=f": is the file that {options.command} reads; name another one") as caught:
        check_outputs(options)
    assert str(output) in str(caught.value)


def test_an_export_never_replaces_a_model_and_results_never_replace_data(tmp_path: Path) -> None:
    for name in ("model.onnx", "x.npy", "y.npy", "x.csv"):
        (tmp_path / name).write_bytes(b"x")
    data = f"--dataset {tmp_path}/x.npy --labels {tmp_path}/y.npy"
    for words in (
        f"export {tmp_path}/model.onnx -o {tmp_path}/model.onnx",
        f"evaluate model {data} --json {tmp_path}/y.npy",
        f"evaluate model {data} --json {tmp_path}/x.npy",
        f"evaluate model --dataset {tmp_path}/x.csv --json {tmp_path}/x.csv",
    ):
        with pytest.raises(UsageError, match="is the file that"):
            check_outputs(parse_deploy(words.split()))
    check_outputs(parse_deploy(f"export {tmp_path}/x.npy -o {tmp_path}/model.onnx".split()))


def test_every_column_of_a_table_has_a_name() -> None:
    rows = [Evaluation(name, 0.5, nbytes, 10, 9, 1e-3, 100.0) for name, nbytes in (("a", 200), ("b", 100))]
    head, _, second = table_of(rows)
    assert re.split(r" {2,}", head)[2:4] == ["bytes", "of first"]
    assert len(re.split(r" {2,}", head)) == len(re.split(r" {2,}", second))
