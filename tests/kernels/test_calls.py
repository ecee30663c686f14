"""What the compiled path sees of arrays, and how calls are told apart."""

from __future__ import annotations

import pytest
from numba import config

from mpicoll.kernels import dispatch_table

pytestmark = pytest.mark.skipif(bool(config.DISABLE_JIT), reason="there is no machine code without a JIT")


def test_arrays_are_laid_out_as_expected() -> None:
    assert dispatch_table.layout_error() == ""


def test_another_layout_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch_table, "header_nbytes", lambda: 24)
    assert "laid out" in dispatch_table.layout_error()


def test_different_calls_have_different_words() -> None:
    seen = {
        dispatch_table.pack_call(collective, single_copy, dtype, op, root)
        for collective in range(11)
        for single_copy in (0, 1)
        for dtype in range(15)
        for op in (0, 9, 16, 0xFFFF)
        for root in (0, 1, 2**30)
    }
    assert len(seen) == 11 * 2 * 15 * 4 * 3
    assert min(seen) >= 0
