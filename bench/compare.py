"""Comparison of two sets of results, with what got slower beyond noise: ``python -m bench.compare before after``.

Folders or files of JSON. Each contender is compared *relative to the baseline of its own launch* (native, or NumPy for
kernels), so that a slower moment of the machine cancels. A change counts if it is larger than the threshold and is
not what chance gives: of hundreds of comparisons some differ by luck, so that p values pass through Benjamini and
Hochberg's procedure ("Controlling the false discovery rate", J. R. Statist. Soc. B 57, 1995), which keeps the expected
share of false alarms among the alarms below 5 %. Results of a single launch do not say how launches differ; 10 % are
assumed. The baseline itself is compared by its times, as a note. The exit status is 1 if anything got slower, 2 if the
results cannot be compared.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench import intervals, result_files, result_table
from bench.intervals import ComparisonKey, Interval
from bench.result_files import ASIDE, COPY, Result, ResultsError, ResultSet

_FALSE_DISCOVERIES = 0.05
_MIN_LENGTHS = 3
_ALL_LENGTHS = 0.05
"""Standard deviation between launches of the mean over all lengths, before anything is known of it."""
_UNKNOWN_LAUNCHES = 0.1
"""Standard deviation of a single launch's ratios from the next one's, on a logarithmic scale."""
_PRIOR_DEGREES = 4
"""How many degrees of freedom the pooled variance counts as."""
_FEW_LAUNCHES = 1.11
"""What Student's t with a dozen degrees of freedom, both sides together, adds to an error's width."""
_FACTS = ("cpu", "cores", "machine", "kernel", "python", "numpy", "numba", "mpi4py")
_SHOWN = 40

Results = Mapping[ComparisonKey, list[Result]]
_Launches = tuple[list[float], list[float]]


@dataclass(frozen=True)
class Change:
    """One contender before and after.

    Attributes
    ----------
    key
        Its case has length 0 for the mean over all lengths.
    before, after
        The baseline's time over its own.
    log, error
        Logarithm of how many times longer it takes, against its baseline, and the standard error of that.
    """

    key: ComparisonKey
    before: Interval
    after: Interval
    log: float
    error: float

    @property
    def factor(self) -> float:
        """Above 1 it became slower."""
        return math.exp(self.log)

    @property
    def p(self) -> float:
        """The probability of such a change, or a larger one, by chance."""
        return math.erfc(abs(self.log) / (_FEW_LAUNCHES * self.error) / math.sqrt(2)) if self.error else 1.0

    def line(self) -> str:
        """Return it in words."""
        case = self.key.case
        what = (
            result_table.describe(case) if case.nbytes else f"{case.benchmark} {case.variant}".strip() + ", all lengths"
        )
        where = f"{what}, {case.dtype}, {case.size} ranks, {self.key.library}"
        more = ", ".join(filter(None, [self.key.setting, f"threads: {self.key.thread_level}"]))
        pace = f"{self.factor - 1:+.0%} time"
        return f"{pace:>11}  {self.key.contender:20} {where}, {more}: {self.before:.2f} -> {self.after:.2f}"


def changes(before: Results, after: Results) -> list[Change]:
    """Compare what is in both and was measured in the same launches as its baseline."""
    pooled = [_pooled_variance(side) for side in (before, after)]
    found: list[Change] = []
    groups: dict[ComparisonKey, list[tuple[Change, list[_Launches]]]] = {}
    for key in sorted(before.keys() & after.keys(), key=str):
        base = _baseline_key(before, key)
        if base is None or base not in after or _is_not_ours(before, key):
            continue
        sides = [intervals.launches(side[base], side[key]) for side in (before, after)]
        if not all(logs for logs, _ in sides):
            continue
        one, other = (intervals.ratio(side[base], side[key]) for side in (before, after))
        error = math.hypot(*(_error(*side, variance) for side, variance in zip(sides, pooled, strict=True)))
        change = Change(key, one, other, math.log(one.value / other.value), error)
        found.append(change)
        all_lengths = key._replace(case=dataclasses.replace(key.case, nbytes=0, count=0))
        groups.setdefault(all_lengths, []).append((change, sides))
    return found + [_over_all_lengths(key, members) for key, members in groups.items() if len(members) >= _MIN_LENGTHS]


def _is_not_ours(results: Results, key: ComparisonKey) -> bool:
    return (
        key.contender.startswith(result_files.NATIVE)
        or key.contender in (COPY, result_files.NUMPY)
        or any(result.detail.get(ASIDE) for result in results[key])
    )


def _over_all_lengths(key: ComparisonKey, members: Sequence[tuple[Change, list[_Launches]]]) -> Change:
    """Return the mean change of a contender over all lengths: small ones show in it that no single length shows.

    All lengths of one launch may have gone well or badly together, so that launches are what is averaged over.
    """
    errors = []
    for side in (0, 1):
        each = [sides[side] for _, sides in members]
        count = min(len(logs) for logs, _ in each)
        means = [statistics.fmean(logs[launch] for logs, _ in each) for launch in range(count)]
        within = math.sqrt(sum(statistics.fmean(e**2 for e in errors) for _, errors in each)) / len(each)
        errors.append(_error(means, [within] * count, _ALL_LENGTHS**2))
    before, after = (_mean([getattr(change, side) for change, _ in members]) for side in ("before", "after"))
    log = statistics.fmean(change.log for change, _ in members)
    return Change(key, before, after, log, math.hypot(*errors))


def _mean(each: Sequence[Interval]) -> Interval:
    value = result_table.geometric_mean([interval.value for interval in each])
    half = math.sqrt(sum(interval.half**2 for interval in each)) / len(each)
    return Interval(value, value * math.exp(-half), value * math.exp(half), each[0].launches)


def _baseline_key(results: Results, key: ComparisonKey) -> ComparisonKey | None:
    name = result_files.baseline(
        n for n in (result_files.NATIVE, result_files.NUMPY) if key._replace(contender=n) in results
    )
    return None if name is None else key._replace(contender=name)


def _pooled_variance(results: Results) -> float:
    """Return the variance of log ratios between launches, from everything that was launched more than once."""
    squares = []
    for key, ours in results.items():
        base = _baseline_key(results, key)
        if base is not None and base != key and len(ours) > 1:
            logs, _ = intervals.launches(results[base], ours)
            squares += [statistics.variance(logs)] if logs else []
    return statistics.fmean(squares) if squares else _UNKNOWN_LAUNCHES**2


def _error(logs: Sequence[float], errors: Sequence[float], prior: float) -> float:
    """Return the standard error of the mean of launches.

    Three launches hardly tell their own variance, which is therefore moderated by another one (Smyth, "Linear models
    and empirical Bayes methods", Stat. Appl. Genet. Mol. Biol. 3, 2004).
    """
    own = statistics.variance(logs) if len(logs) > 1 else prior
    degrees = len(logs) - 1
    between = (_PRIOR_DEGREES * prior + degrees * own) / (_PRIOR_DEGREES + degrees) / len(logs)
    within = statistics.fmean(error**2 for error in errors) / len(errors)
    return math.sqrt(max(between, within))


def beyond_noise(every: Sequence[Change], threshold: float) -> list[Change]:
    """Return those that are neither small nor, at the rate that is allowed, chance; the largest first.

    Means over all lengths, which are fewer, are a family of tests of their own.
    """
    kept = []
    for family in ([c for c in every if not c.key.case.nbytes], [c for c in every if c.key.case.nbytes]):
        ranked = sorted(family, key=lambda change: change.p)
        passing = [n for n, c in enumerate(ranked, 1) if c.p <= _FALSE_DISCOVERIES * n / len(ranked)]
        kept += [c for c in ranked[: max(passing, default=0)] if abs(c.log) > math.log1p(threshold)]
    return sorted(kept, key=lambda change: -abs(change.log))


def _notes(runs: Sequence[Sequence[ResultSet]], results: Sequence[Results]) -> list[str]:
    """Return what else a reader has to know."""
    lines = []
    for name in _FACTS:
        sides = [{str(run.metadata.get(name)) for run in side} for side in runs]
        if sides[0] != sides[1]:
            lines.append(f"{name} differs: {', '.join(sorted(sides[0]))} before, {', '.join(sorted(sides[1]))} after")
    single = sum(len(launches) == 1 for side in results for launches in side.values())
    if single:
        lines.append(f"{single} results are from one launch each: taken as sure to {_UNKNOWN_LAUNCHES:.0%} only")
    for mine, theirs, where in ((0, 1, "before"), (1, 0, "after")):
        alone = len(results[mine].keys() - results[theirs].keys())
        lines += [f"{alone} results are only in what was measured {where}"] if alone else []
        new = sorted(_manners_of(results[mine]) - _manners_of(results[theirs]))
        lines += [f"only what was measured {where} has: {'; '.join(new)}"] if new else []
    base = [key for key in results[0].keys() & results[1].keys() if key == _baseline_key(results[0], key)]
    if base:
        pace = [intervals.median(results[1][key]) / intervals.median(results[0][key]) for key in base]
        lines.append(
            f"the baselines' own times changed by {result_table.geometric_mean(pace) - 1:+.0%} (the machine's pace)"
        )
    return lines


def _manners_of(results: Results) -> set[str]:
    return {result_files.manner(key.case.pace, key.case.buffers) for key in results}


def _manners(results: Sequence[Results]) -> str:
    """Return in which manners calls were made, if no manner is common to both sides."""
    before, after = map(_manners_of, results)
    if before & after:
        return ""
    sides = [f"{side} with {', and '.join(sorted(found))}" for side, found in (("before", before), ("after", after))]
    return f": {'; '.join(sides)}; see --calls and --buffers of bench.collectives"


def _percent(text: str) -> float:
    try:
        value = float(text.rstrip("%")) / 100
    except ValueError:
        value = -1.0
    if not 0 <= value < 10:
        raise argparse.ArgumentTypeError(f"{text!r} is not a percentage such as 5%")
    return value


def make_parser() -> argparse.ArgumentParser:
    """Build the parser."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--threshold", type=_percent, default=0.05, help="smaller changes do not count (default: 5%%)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all comparisons")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Compare and print; see the module for the exit status."""
    arguments = make_parser().parse_args(argv)
    try:
        runs = [result_files.load_all([path]) for path in (arguments.before, arguments.after)]
        results = intervals.collect(runs[0]), intervals.collect(runs[1])
        every = changes(*results)
        if not every:
            raise ResultsError(
                f"{arguments.before}, {arguments.after}: nothing was measured in both{_manners(results)}"
            )
    except ResultsError as error:
        sys.stderr.write(f"bench.compare: {error}\n")
        return 2
    found = beyond_noise(every, arguments.threshold)
    slower = [change for change in found if change.factor > 1]
    faster = [change for change in found if change.factor < 1]
    _print(runs, results, every, slower, faster)
    if arguments.json:
        arguments.json.write_text(json.dumps([_as_json(change, change in found) for change in every], indent=1))
    return 1 if slower else 0


def _print(runs: Any, results: Any, every: Sequence[Change], slower: list[Change], faster: list[Change]) -> None:
    lines = [f"note: {note}" for note in _notes(runs, results)]
    for title, changed in (("slower", slower), ("faster", faster)):
        lines += ["", f"{title}:", *(change.line() for change in changed[:_SHOWN])] if changed else []
        lines += [f"            and {len(changed) - _SHOWN} more"] if len(changed) > _SHOWN else []
    overlap = sum(abs(c.log) <= math.hypot(c.before.half, c.after.half) for c in every)
    lines += ["", f"{len(every)} compared: {len(slower)} slower and {len(faster)} faster beyond noise; "]
    lines[-1] += f"{overlap} differ by less than their intervals"
    sys.stdout.write("\n".join(lines).lstrip("\n") + "\n")


def _as_json(change: Change, counts: bool) -> dict[str, Any]:
    return {**change.key._asdict(), "case": asdict(change.key.case), "factor": change.factor, "p": change.p} | {
        "before": change.before._asdict(),
        "after": change.after._asdict(),
        "beyond_noise": counts,
    }


if __name__ == "__main__":
    sys.exit(main())
