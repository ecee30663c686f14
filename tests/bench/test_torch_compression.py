"""Table of bench.torch_compression."""

from __future__ import annotations

from bench.torch_compression import GLOO, table


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_ratios_are_those_to_gloo() -> None:
    seconds = {GLOO: 0.3, "int8": 0.15, "sign": 0.09}
    lines = table(seconds, 0.1, {GLOO: 1.5, "int8": 1.25, "sign": 2.0})
    assert cells(lines[2]) == [GLOO, "300 ms", "1.00", "200 ms", "1.00", "1.500"]
    assert cells(lines[3]) == ["int8", "150 ms", "2.00", "50 ms", "4.00", "1.250"]


def test_a_step_that_is_no_longer_than_one_alone_has_no_ratio() -> None:
    lines = table({GLOO: 0.3, "sign": 0.09}, 0.1, {GLOO: 1.5, "sign": 2.0})
    assert cells(lines[3]) == ["sign", "90 ms", "3.33", "-", "-", "2.000"]
