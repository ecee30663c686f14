"""Texts and regression targets as data sets, and models that functions of the user's return."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll import Intracomm
from mpicoll.data.datasets import load
from mpicoll.data.text_samples import TextSamples, synthetic_text, windows
from mpicoll.errors import DataError, UsageError
from mpicoll.train.options import parse
from mpicoll.train.training_run import run

SMALL = "--context 8 --width 8 --heads 2 --layers 1 --batch 8 --epochs 1 --quiet"
OWN = """
import numpy as np
from mpicoll.models.layers import Dense
from mpicoll.models.sequential import Model

class Own:
    def __init__(self, facts): self.facts = facts
    def initial(self, seed): return [np.zeros((self.facts.feature_count, self.facts.output_count), self.facts.dtype)]
    def forward(self, parameters, x, y):
        logits = x @ parameters[0]
        logits -= logits.max(axis=1, keepdims=True)
        p = np.exp(logits); p /= p.sum(axis=1, keepdims=True)
        rows = np.arange(len(y))
        hits = (p.argmax(axis=1) == y).sum()
        loss = -np.log(p[rows, y]).sum()
        p[rows, y] -= 1
        return loss, hits, (x, p)
    def backward(self, parameters, saved): return [saved[0].T @ saved[1]]

def layers(facts): return Model([Dense(facts.feature_count, facts.output_count)], facts.dtype)
def wide(facts): return Model([Dense(facts.feature_count, facts.output_count)], "float64")
def nothing(facts): return 3
def fails(facts): raise RuntimeError("no\\nluck")
number = 7
"""


def loaded(words):
    return load(parse(words.split()), MPI.COMM_SELF)


def trained(words):
    return run(parse([*words.split(), "--quiet"]), Intracomm(MPI.COMM_SELF))


def test_windows_follow_each_other_and_stay_within_a_text():
    texts = [np.arange(10, dtype=np.uint8), np.arange(100, 103, dtype=np.uint8), np.arange(200, 209, dtype=np.uint8)]
    assert [windows(len(text), 4) for text in texts] == [2, 0, 2]
    samples = TextSamples(texts, 4, 1, 4)
    x, y = samples.batch(np.array([2, 0, 1]))
    np.testing.assert_array_equal(x, [[204, 205, 206, 207], [4, 5, 6, 7], [200, 201, 202, 203]])
    np.testing.assert_array_equal(y, x + np.uint8(1))
    assert (x.dtype, y.dtype, samples.count) == (np.uint8, np.int64, 3)
    assert samples.batch(np.empty(0, np.int32))[0].shape == (0, 4)


def test_the_end_of_a_directorys_texts_is_the_test_part(tmp_path):
    (tmp_path / "b.txt").write_bytes(bytes(range(50, 91)))
    (tmp_path / "a.txt").write_bytes(bytes(range(41)))
    (tmp_path / "empty.txt").touch()
    (tmp_path / "c.bin").write_bytes(b"x" * 99)
    dataset = loaded(f"--model transformer --dataset text:{tmp_path} --context 8 --test-fraction 0.3")
    assert (dataset.train.count, dataset.test.count) == (7, 3)
    np.testing.assert_array_equal(dataset.train.batch(np.array([5]))[0], [range(50, 58)])
    np.testing.assert_array_equal(dataset.test.batch(np.array([2]))[1], [range(83, 91)])


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: None, "No such file"),
        (lambda path: path.touch(), "the file is empty"),
        (lambda path: path.write_bytes(b"short"), "5 bytes in 1 file give 0 samples of --context 8"),
        (lambda path: path.mkdir(), "no file"),
    ],
)
def test_a_text_that_cannot_be_used_is_named(tmp_path, make, says):
    make(tmp_path / "book.txt")
    with pytest.raises(DataError, match=says) as caught:
        loaded(f"--model transformer --dataset text:{tmp_path}/book.txt --context 8")
    assert "book.txt" in str(caught.value)


def test_synthetic_text_is_sentences_that_the_seed_determines():
    text = synthetic_text(5000, 1)
    assert len(text) == 5000
    np.testing.assert_array_equal(text, synthetic_text(5000, 1))
    assert (text != synthetic_text(5000, 2)).any()
    assert b".\n" in text.tobytes()
    assert text.max() < 128


def test_a_language_model_reports_perplexity_and_no_accuracy(tmp_path, capsys):
    trained(f"{SMALL} --model transformer --dataset synthetic_text:2000 --json {tmp_path}/r --log-steps {tmp_path}/s")
    result = json.loads((tmp_path / "r").read_text())
    assert result["test_perplexity"] == pytest.approx(np.exp(result["test_loss"]))
    epoch = result["epochs"][-1]
    assert (epoch["train_accuracy"], epoch["test_accuracy"], result["test_accuracy"]) == (None, None, None)
    assert epoch["train_perplexity"] == pytest.approx(np.exp(epoch["train_loss"]))
    assert (tmp_path / "s").read_text().splitlines()[1].endswith(",")
    words = f"{SMALL} --model transformer --dataset synthetic_text:2000".replace(" --quiet", "")
    run(parse([*words.split(), "--no-progress"]), Intracomm(MPI.COMM_SELF))
    assert "nats/byte, perplexity" in capsys.readouterr().out


def test_a_regression_learns_a_linear_function_and_has_no_accuracy():
    result = trained("--model logistic --task regression --dataset synthetic:800x8x1 --epochs 8 --weight-decay 0")
    assert result["test_loss"] < 0.02
    assert result["test_accuracy"] is None
    assert result["epochs"][-1]["train_accuracy"] is None


@pytest.mark.parametrize(
    ("y", "says"),
    [
        (np.array([1.0, np.nan, 0, 0]), "y: a target is not finite"),
        (np.zeros((4, 2, 1)), "y: shape"),
        (np.zeros(3), "y: shape"),
        (np.zeros(4, bool), "y: targets are real numbers"),
    ],
)
def test_targets_are_checked(tmp_path, y, says):
    np.savez(tmp_path / "d.npz", x=np.zeros((4, 3)), y=y)
    with pytest.raises(DataError, match=says):
        loaded(f"--task regression --dataset {tmp_path}/d.npz")


def test_targets_of_a_file(tmp_path):
    x, y = np.random.default_rng(0).random((10, 3)), np.arange(20.0).reshape(10, 2)
    np.savez(tmp_path / "d.npz", x=x, y=y)
    dataset = loaded(f"--task regression --dataset {tmp_path}/d.npz --test-fraction 0 --dtype float64")
    np.testing.assert_array_equal(dataset.train.batch(np.array([3, 1]))[1], y[[3, 1]])
    assert dataset.class_count == 2


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_example.py").write_text(OWN)
    (tmp_path / "own_broken.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("factory", ["Own", "layers"])
def test_a_function_of_ones_own_returns_the_model(factory):
    result = trained(f"--model own_example:{factory} --dataset synthetic:300x8x3 --epochs 3")
    assert result["test_accuracy"] > 0.8
    assert result["config"]["model"] == f"own_example:{factory}"


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("model", "says", "kind"),
    [
        ("no_such_thing:f", "no module named no_such_thing", UsageError),
        ("own_broken:f", "no module named no_such_package", UsageError),
        ("own_example:missing", "own_example has no function missing", UsageError),
        ("own_example:number", "own_example has no function number", UsageError),
        ("own_example:nothing", "returns int, which has no initial, forward, backward", DataError),
        ("own_example:fails", "RuntimeError: no luck", DataError),
        ("own_example:wide", "parameters are of float64; this run is with --dtype float32", DataError),
    ],
)
def test_what_a_function_of_ones_own_does_wrong_is_said(model, says, kind):
    with pytest.raises(kind, match=says) as caught:
        trained(f"--model {model} --dataset synthetic:100x8x3")
    assert model in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_model_of_the_guide_trains(tmp_path, monkeypatch):
    page = Path(__file__, "../../../docs/guides/train.md").resolve().read_text()
    (example,) = re.findall(r"^```python\n(# models.py.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "models_of_the_guide.py").write_text(example)
    monkeypatch.syspath_prepend(tmp_path)
    result = trained("--model models_of_the_guide:small --dataset digits --epochs 2")
    assert result["test_accuracy"] > 0.7
