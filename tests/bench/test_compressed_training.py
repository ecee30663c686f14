"""The benchmark's choices and its table; that it trains is seen by running it."""

import pytest

from bench import compressed_training as bench
from mpicoll.errors import UnknownCompressor
from tests.bench.synthetic import row_cells


def outcome(variant, seed, accuracy, task="digits"):
    return bench.CompressionOutcome(task, variant, seed, 10, accuracy, [1.0, 0.5], 1000.0, 8.0, 0.002)


def test_compressors_that_need_feedback_are_trained_with_and_without():
    names = [variant.name for variant in bench.variants(["dense", "int8", "sign"])]
    assert names == ["dense", "int8", "sign +EF", "sign -EF"]


def test_only_what_was_asked_for_has_to_be_there(monkeypatch):
    monkeypatch.setattr(bench, "SPECS", ("dense", "int99"))
    assert [variant.name for variant in bench.variants([])] == ["dense"]
    with pytest.raises(UnknownCompressor, match="int99"):
        bench.variants(["int99"])


def test_means_are_compared_with_dense():
    outcomes = [outcome("dense", seed, accuracy) for seed, accuracy in enumerate((0.90, 0.96, 0.95))]
    outcomes += [outcome("sign +EF", seed, accuracy) for seed, accuracy in enumerate((0.94, 0.80, 0.99))]
    lines = bench.table(outcomes).splitlines()
    assert "digits: 10 steps, 3 seeds" in lines
    rows = [row_cells(line) for line in lines]
    assert ["dense", "93.67% ±7.99", "+0.00 ±0.00", "0.5000", "1,000", "8.0", "2.0"] in rows
    assert ["sign +EF", "91.00% ±24.47", "-2.67 ±28.68", "0.5000", "1,000", "8.0", "2.0"] in rows


def test_the_drawing_has_a_panel_for_each_task(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "loss.svg"
    bench.draw(path, [outcome("dense", 0, 0.9), outcome("sign -EF", 0, 0.9, "clouds")])
    assert path.read_text().count('id="axes_') == 2


@pytest.mark.parametrize("options", ["--plot x.pdf", "--seeds 0", "--compression int99"])
def test_wrong_options_are_refused(options, capsys):
    with pytest.raises(SystemExit) as caught:
        bench.main(options.split())
    assert caught.value.code == 2
    assert options.split()[0] in capsys.readouterr().err
