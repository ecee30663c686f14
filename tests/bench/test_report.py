"""The report shows everything, and stands alone."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from bench import headline, report, result_files
from bench.result_files import BACK_TO_BACK, SINGLE, UNTOUCHED, WRITTEN, Case, Result, ResultSet
from tests.bench import synthetic

pytest.importorskip("matplotlib")
HOSTILE = "<script>alert('x')</script> & \"quotes\""


def extra(benchmark: str, size: int, contenders: tuple[str, ...], **detail: float) -> ResultSet:
    results = [
        Result(Case(benchmark, nbytes, nbytes // 4, "float32", size), name, np.full(20, 1e-6 * (n + 1)), 1, 0, detail)
        for nbytes in (4096, 65536)
        for n, name in enumerate(contenders)
    ]
    return dataclasses.replace(synthetic.run(1, size=size), results=results)


@pytest.fixture(scope="module")
def text() -> str:
    runs = [synthetic.run(seed, size=size) for seed in range(2) for size in (2, 8)]
    runs.append(synthetic.run(5, pace={"native": 0.3}, thread_level="funneled"))
    runs.append(synthetic.run(6, pace={"native (ring)": 0.9}, launcher=HOSTILE, warnings=[HOSTILE]))
    runs.append(extra("kernel SUM", 1, ("numpy", "ours", "copy")))
    runs.append(extra("overlap allreduce", 2, ("native", "auto"), overlap=0.5))
    return report.page(runs)


def test_every_figure_is_there(text: str) -> None:
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", text)
    assert text.count("<svg ") == len(captions) == 5  # crossover, curves for 2 and 8 ranks, kernels, overlap
    assert text.count('role="img"') == 5
    for word in ("fastest for each length", "2 ranks", "8 ranks", "kernels", "overlaps"):
        assert any(word in caption for caption in captions), word
    for name in ("native", "auto", "plan", "ring", "tree", "native (ring)"):
        assert f">{name}<" in text, name


def test_it_stands_alone(text: str) -> None:
    assert "<script" not in text.lower()
    assert not re.search(r'(?:src|href)="(?!#)', text)
    assert len(text) < 1.5e6


def test_the_page_is_well_formed(text: str) -> None:
    class Checker(HTMLParser):
        open: list[str] = []  # noqa: RUF012

        def handle_starttag(self, tag: str, attrs: object) -> None:
            if tag not in ("meta", "br", "path", "use", "rect", "image"):
                self.open.append(tag)

        def handle_endtag(self, tag: str) -> None:
            if self.open and tag in self.open:
                assert self.open.pop() == tag

    checker = Checker()
    checker.feed(text)
    assert not checker.open


def test_text_from_files_is_escaped(text: str) -> None:
    assert text.count("&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;") == 2


def test_the_headline_takes_the_best_baseline() -> None:
    runs = [synthetic.run(1, launch_noise=0.0), synthetic.run(2, pace={"native": 0.25}, thread_level="funneled")]
    ratios = {(line[4], line[5]): float(line[6].rstrip("x")) for line in headline.lines(runs)}
    assert ratios["auto", "native"] == pytest.approx(2, rel=0.1)
    assert ratios["auto", "best baseline"] == pytest.approx(0.5, rel=0.1)
    assert ratios["plan", "best baseline"] == pytest.approx(1.25, rel=0.1)


def test_the_headline_in_short() -> None:
    runs = [synthetic.run(1, launch_noise=0.0), synthetic.run(2, pace={"native": 0.25}, thread_level="funneled")]
    head, *rows = headline.in_short(runs)
    assert head[1:] == ["library", "calls", "ranks", "auto", "auto, best baseline", "plan", "plan, best baseline"]
    long = {line[:6]: line[6] for line in headline.lines(runs)}
    for row in rows:
        assert [cell.partition(" ")[0] + "x" for cell in row[4:]] == [
            long[(*row[:4], contender, against)]
            for contender in ("auto", "plan")
            for against in ("native", "best baseline")
        ]


def test_the_headline_is_from_written_buffers_in_both_paces() -> None:
    quick = {**synthetic.PACE, "auto": 0.01}
    runs = [synthetic.run(1), synthetic.run(2, manner=(SINGLE, WRITTEN))]
    runs.append(synthetic.run(3, pace=quick, manner=(BACK_TO_BACK, UNTOUCHED)))
    _, *rows = headline.in_short(runs)
    assert [row[2] for row in rows] == ["back to back", "single"]
    assert all(float(row[4].partition(" ")[0]) < 3 for row in rows)
    _, row = headline.in_short(runs[2:])  # as from before there was another manner
    assert row[2] == "back to back, buffers untouched"
    assert float(row[4].partition(" ")[0]) > 30


def test_other_ways_of_native_are_baselines() -> None:
    runs = [synthetic.run(1, launch_noise=0.0, pace={**synthetic.PACE, "native persistent": 0.25})]
    ratios = {(line[4], line[5]): float(line[6].rstrip("x")) for line in headline.lines(runs)}
    assert ratios["auto", "native"] == pytest.approx(2, rel=0.1)
    assert ratios["auto", "best baseline"] == pytest.approx(0.5, rel=0.1)


def test_wrong_elements_stand_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = synthetic.run(1)
    result_files.save_in(tmp_path, dataclasses.replace(run, results=[dataclasses.replace(run.results[0], wrong=7)]))
    assert report.main([str(tmp_path)]) == 1
    assert "7 elements of results were wrong" in (tmp_path / "report.html").read_text()
    assert report.main([str(tmp_path / "missing.json")]) == 2
    assert "missing.json" in capsys.readouterr().err
