"""What the dispatch table of a new communicator says is what `select.choose` says, and is found only once."""

from __future__ import annotations

import numpy as np
import pytest

from mpicoll.collectives import dispatch_choices, select
from mpicoll.collectives.select import Capabilities, Rule
from mpicoll.kernels import operation_words as words
from mpicoll.kernels.dispatch_table import BUCKETS
from mpicoll.kernels.operation_words import COLLECTIVES
from mpicoll.shared_memory.fast_dispatch import FastDispatch
from mpicoll.shared_memory.method_times import LENGTHS, Ratios

FAST = Ratios(*[(0.1,) * len(LENGTHS)] * len(Ratios._fields))
MEANS = Capabilities(4, 1 << 24, in_memory=COLLECTIVES, copies=FAST)
ALL = [
    MEANS,
    MEANS._replace(copies=None),
    MEANS._replace(copies=Ratios()),
    MEANS._replace(shared_nbytes=4096),
    MEANS._replace(copies=FAST._replace(bcast=Ratios().bcast)),
    MEANS._replace(rules={"bcast": (Rule(1000, "tree"),)}),
    MEANS._replace(rules={"bcast": (Rule(2000, "tree"),)}),
    MEANS._replace(rules={"reduce": (Rule(2000, "tree"),)}),
]


def test_choices_are_those_of_each_length() -> None:
    found = [
        {(collective, bits): name for collective, bits, name in dispatch_choices._choices_by_length(each, BUCKETS)}
        for each in ALL
    ]
    for means, choices in zip(ALL, found, strict=True):
        for collective in COLLECTIVES:
            for bits in range(25):
                ends = {select.choose(collective, end, means) for end in (1 << bits >> 1, (1 << bits) - 1)}
                assert choices.get((collective, bits)) == (ends.pop() if len(ends) == 1 else None)
    with_rules = found[-3:]
    assert all(found.count(each) == 1 for each in with_rules)


def test_communicators_of_one_kind_share_their_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    first = dispatch_choices._choices_by_length(MEANS, BUCKETS)

    def fail(*_: object) -> str:
        raise AssertionError("chosen again")

    monkeypatch.setattr(dispatch_choices, "choose", fail)
    assert dispatch_choices._choices_by_length(MEANS._replace(rules={}), BUCKETS) is first
    with pytest.raises(AssertionError, match="chosen again"):
        dispatch_choices._choices_by_length(MEANS._replace(size=5), BUCKETS)


def test_choices_are_copied_from_one_dispatch_table_to_the_next() -> None:
    tables = [FastDispatch(2, np.zeros(words.job_words(2), np.int64)) for _ in range(3)]
    tables[0].choose("bcast", 7, words.STAGE)
    tables[0].choose("exscan", BUCKETS - 1, words.TRANSFER)
    tables[1].chosen = tables[0].chosen
    assert (tables[1].chosen == tables[0].chosen).all()
    assert np.count_nonzero(tables[1].chosen) == 2
    tables[0].choose("bcast", 7, None)
    assert np.count_nonzero(tables[1].chosen) == 2
    assert not tables[2].chosen.any()
