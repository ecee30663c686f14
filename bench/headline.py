"""Headline of a report: ratios of our times to those of the best baseline."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

from bench import intervals, result_table
from bench.intervals import ComparisonKey
from bench.result_files import NATIVE, UNTOUCHED, WRITTEN, Case, Result, ResultSet

OURS = ("auto", "plan", "segments")
_OTHER_LIBRARIES = ("gloo", "numba-mpi")
_DEFAULT_LEVEL = "multiple"
_NATIVE, _BEST = "native", "best baseline"

Line = tuple[str, str, str, str, str, str, str, str, str]
_Place = tuple[str, str, Case]


def lines(runs: Sequence[ResultSet]) -> Iterator[Line]:
    """Yield a row for each benchmark, library and number of ranks, for each of ours, against native and the best.

    Results with send buffers untouched count only where there are none with buffers written before each call.
    """
    together = _honest(intervals.collect(runs))
    best = _best_baselines(together)
    keys = sorted((key for key in together if key.contender in OURS and key.thread_level == _DEFAULT_LEVEL), key=_group)
    for _, members in itertools.groupby(keys, key=_group):
        own = list(members)
        yield from _against(own, together, {key: _native(key, together) for key in own}, _NATIVE)
        if any(best.get(_place(key)) not in (None, _native(key, together)) for key in own):
            yield from _against(own, together, {key: best.get(_place(key)) for key in own}, _BEST)


def in_short(runs: Sequence[ResultSet]) -> list[list[str]]:
    """Return the same as a table, the header first: a row for each number of ranks, the means with the least."""
    places: dict[tuple[str, ...], dict[tuple[str, str], str]] = {}
    for what, where, calls, size, contender, against, mean, least, _ in lines(runs):
        places.setdefault((what, where, calls, size), {})[contender, against] = (
            f"{mean.rstrip('x')} ({least.rstrip('x')})"
        )
    columns = list(dict.fromkeys(column for cells in places.values() for column in cells))
    columns.sort(key=lambda column: (OURS.index(column[0]), column[1] != _NATIVE))
    names = [contender if against == _NATIVE else f"{contender}, {against}" for contender, against in columns]
    rows = [[*place, *(cells.get(column, "") for column in columns)] for place, cells in places.items()]
    return [["native's time / ours: geometric mean (least)", "library", "calls", "ranks", *names], *rows]


def _honest(together: Mapping[ComparisonKey, list[Result]]) -> dict[ComparisonKey, list[Result]]:
    written = {_untouched(key) for key in together if key.case.buffers == WRITTEN}
    return {key: results for key, results in together.items() if key not in written}


def _untouched(key: ComparisonKey) -> ComparisonKey:
    return key._replace(case=dataclasses.replace(key.case, buffers=UNTOUCHED))


def _group(key: ComparisonKey) -> tuple[str, ...]:
    case = key.case
    return (
        case.benchmark,
        case.dtype,
        case.variant,
        key.library,
        f"{case.size:6d}",
        key.setting,
        case.pace,
        case.buffers,
        key.contender,
    )


def _place(key: ComparisonKey) -> _Place:
    return key.library, key.setting, key.case


def _native(key: ComparisonKey, together: Mapping[ComparisonKey, list[Result]]) -> float | None:
    native = together.get(key._replace(contender=NATIVE))
    return intervals.median(native) if native else None


def _best_baselines(together: Mapping[ComparisonKey, list[Result]]) -> dict[_Place, float]:
    """Return the least median of any baseline, for each library, setting and case."""
    best: dict[_Place, float] = {}
    for key, results in together.items():
        if key.contender.startswith(NATIVE) or key.contender in _OTHER_LIBRARIES:
            if key.contender.endswith(" alone"):
                continue
            median = intervals.median(results)
            best[_place(key)] = min(median, best.get(_place(key), median))
    return best


def _against(
    keys: Sequence[ComparisonKey],
    together: Mapping[ComparisonKey, list[Result]],
    times: Mapping[ComparisonKey, float | None],
    name: str,
) -> Iterator[Line]:
    ratios = [time / intervals.median(together[key]) for key in keys if (time := times[key]) is not None]
    if not ratios:
        return
    case, key = keys[0].case, keys[0]
    what = " ".join(filter(None, [case.benchmark, case.dtype, case.variant]))
    where = ", ".join(filter(None, [key.library, key.setting]))
    mean, least = f"{result_table.geometric_mean(ratios):.2f}x", f"{min(ratios):.2f}x"
    calls = case.pace if case.buffers == WRITTEN else f"{case.pace}, buffers {case.buffers}"
    yield what, where, calls, str(case.size), key.contender, name, mean, least, str(len(ratios))
