"""Tables in documents are what the commands print that stand beside them."""

import pytest

from bench import async_modes, compressed_training, compression, headline, result_table, training
from tests.bench import synthetic
from tests.bench.synthetic import row_cells
from tests.test_layers import REPOSITORY


def trained(size):
    return training.Outcome("large", "replicated", size, 1.0, losses=[1.0])


def by_strategy():
    return training.table([trained(size) for size in (1, 2, 4, 8)], "large")


def by_mode():
    return async_modes.table(
        [async_modes.ModeOutcome("digits", "sync", 0, 1.0, 1.0, None, None, None, 1.0, 1.0, [], [])]
    )


def by_compressor():
    outcome = compressed_training.CompressionOutcome("digits", "dense", 0, 1, 1.0, [1.0], 1.0, 1.0, 1.0)
    return compressed_training.table([outcome]).partition("|")[2]


def by_compressed_length():
    names = [compression.contender(spec) for spec in compression.DEFAULT]
    run = synthetic.run(1, pace=dict.fromkeys(["native", "dense", *names], 1.0))
    (rows,) = result_table.group([run]).values()
    return "|".join(name for name in result_table.cells(rows, brief=True)[0])


def in_short():
    runs = [synthetic.run(1), synthetic.run(2, pace={"native": 0.25}, thread_level="funneled")]
    return "|".join(headline.in_short(runs)[0])


@pytest.mark.parametrize("printed", [by_strategy, by_mode, by_compressor, by_compressed_length, in_short])
def test_the_site_has_the_columns_that_are_printed(printed):
    pages = sorted((REPOSITORY / "docs").rglob("*.md"))
    lines = [line for page in pages for line in page.read_text().splitlines()]
    assert row_cells(printed().splitlines()[0]) in [row_cells(line) for line in lines if line.startswith("|")]
