"""Results survive being written and read; what is not a file of results is refused by name."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest

from bench import result_files
from bench.result_files import Case, Result, ResultsError, ResultSet
from tests.bench import synthetic


def test_a_run_reads_back(tmp_path: Path) -> None:
    run = synthetic.run(1, size=8, commit="abc")
    files = [result_files.save_in(tmp_path, run), result_files.save_in(tmp_path, run)]
    assert files[0] != files[1]
    for back in result_files.load_all([tmp_path]):
        assert back.metadata == run.metadata
        assert [r.case for r in back.results] == [r.case for r in run.results]
        assert [r.detail for r in back.results] == [r.detail for r in run.results]
        for one, other in zip(back.results, run.results, strict=True):
            np.testing.assert_allclose(one.samples, other.samples, rtol=1e-4)


def test_bandwidths_are_those_of_nccl_tests() -> None:
    second = np.ones(3)
    for collective, factor in (("allreduce", 1.75), ("reduce_scatter", 0.875), ("allgather", 0.875), ("bcast", 1.0)):
        result = Result(Case(collective, 8 * 10**9, 2 * 10**9, "float32", 8), "auto", second)
        assert result.algbw == 8
        assert result.busbw == 8 * factor


def test_percentiles_and_csv() -> None:
    samples = np.arange(1.0, 101.0)
    result = Result(Case("allreduce", 8, 2, "float32", 2), "ring", samples, wrong=3)
    summary = result.summary()
    found = [summary[name] for name in ("median", "p5", "p90", "p95", "p99")]
    assert found == [50.5, 5.95, 90.1, 95.05, 99.01]
    run = ResultSet("bench.collectives", {"library": 'a "quoted", name'}, [result])
    stream = io.StringIO()
    result_files.save_csv([run, run], stream)
    rows = list(csv.DictReader(io.StringIO(stream.getvalue())))
    assert [row["wrong"] for row in rows] == ["3", "3"]
    assert rows[0]["library"] == 'a "quoted", name'
    assert run.wrong == 3


def test_files_of_version_1_knew_one_manner(tmp_path: Path) -> None:
    path = result_files.save_in(tmp_path, synthetic.run(1))
    content = json.loads(path.read_text())
    content["version"] = 1
    for row in content["results"]:
        del row["pace"], row["buffers"]
    path.write_text(json.dumps(content))
    (back,) = result_files.load_all([tmp_path])
    assert {(r.case.pace, r.case.buffers, r.case.manner) for r in back.results} == {("back to back", "untouched", "")}
    content["version"] = 2
    path.write_text(json.dumps(content))
    with pytest.raises(ResultsError, match=r"damaged.*pace"):
        result_files.load(path)


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{", '{"format": "other"}', '{"format": "mpicoll-bench", "version": 99}', '{"format": "mpicoll-bench"}'],
)
def test_other_files_are_refused_by_name(content: str, tmp_path: Path) -> None:
    path = tmp_path / "odd.json"
    path.write_text(content)
    with pytest.raises(ResultsError, match=r"odd\.json"):
        result_files.load(path)


@pytest.mark.parametrize("samples", [[], [0.0], [-1.0], [float("nan")], "x", None])
def test_samples_must_be_times(samples: object, tmp_path: Path) -> None:
    path = result_files.save_in(tmp_path, synthetic.run(1))
    content = json.loads(path.read_text())
    content["results"][3]["samples"] = samples
    path.write_text(json.dumps(content))
    with pytest.raises(ResultsError, match="damaged"):
        result_files.load(path)


def test_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="no results"):
        result_files.load_all([tmp_path])
    with pytest.raises(ResultsError, match="nowhere"):
        result_files.load_all([tmp_path / "nowhere.json"])
