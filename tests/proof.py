"""What is proved of plans on shared memory, and how long that takes: ``make proof MINUTES=10``.

Sequences of operations are run on simulated memory (see :mod:`mpicoll.plans.verify_plan`): all of a kind where the time
suffices, else some at random. Ends with status 1 if one of them is refuted.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from tqdm import tqdm

from mpicoll.plans.verify_plan import (
    METHODS,
    Refuted,
    every_operation,
    operation,
    prove,
    prove_communicators,
    prove_lanes,
)
from mpicoll.quantities import table
from mpicoll.schedules import COLLECTIVES

Proof = Callable[[], None]


def _single(size: int, place: int, root: int, method: str) -> None:
    """Prove the `place`-th operation for so many ranks, with another root if it has one."""
    one = next(itertools.islice(every_operation(size), place, None))
    if root:
        one = operation(size, one.kind, one.count, root, "private" if one.places[0][0] else "shared")
    prove(size, (one,), method)


def _with_every_root(size: int) -> list[Proof]:
    found = []
    for place, one in enumerate(every_operation(size)):
        roots = range(1, size - 1) if COLLECTIVES[one.kind].rooted and one.root == 0 else ()
        found += [partial(_single, size, place, root, method) for root in (0, *roots) for method in METHODS]
    return found


def _two(size: int) -> list[Proof]:
    pairs = itertools.product(every_operation(size), repeat=2)
    return [partial(prove, size, pair, method) for pair in pairs for method in METHODS]


def _three(numbers: random.Random) -> Proof:
    size = numbers.randint(2, 6)
    return partial(prove, size, numbers.choices(list(every_operation(size)), k=3), numbers.choice(METHODS))


def _drawn(make: Callable[[random.Random], Proof], seed: int) -> Iterator[Proof]:
    numbers = random.Random(seed)
    while True:
        yield make(numbers)


def _lanes(numbers: random.Random) -> Proof:
    size, lanes = numbers.choice([(2, 2), (2, 3), (3, 2), (4, 2)])
    operations = list(every_operation(size))
    sequences = [numbers.choices(operations, k=2) for _ in range(lanes)]
    return partial(prove_lanes, size, sequences, numbers.choice(METHODS))


def _communicators(numbers: random.Random) -> Proof:
    size = numbers.randint(2, 5)
    members = [numbers.sample(range(size), numbers.randint(2, size)) for _ in range(numbers.randint(2, 3))]
    operations = [list(every_operation(len(each))) for each in members]
    which = numbers.choices(range(len(members)), k=4)
    calls = [(number, numbers.choice(operations[number])) for number in which]
    return partial(prove_communicators, members, calls, numbers.choice(METHODS))


def _try(proof: Proof) -> str:
    try:
        proof()
    except Refuted as error:
        return str(error)
    return ""


class Row:
    """A kind of sequences, and how many of them are proved."""

    def __init__(self, name: str, sizes: Sequence[int], proofs: Callable[[int], list[Proof]] | Iterator[Proof]) -> None:
        self.name, self.sizes, self.proved, self.every, self.seconds = name, sizes, 0, 0, 0.0
        if callable(proofs):
            known = [proof for size in sizes for proof in proofs(size)]
            self.every = len(known)
            random.Random(1).shuffle(known)
            self.proofs = iter(known)
        else:
            self.proofs = proofs

    def work(self, pool: ProcessPoolExecutor, seconds: float, workers: int) -> list[str]:
        """Prove for so long; return what is refuted."""
        began, wrong = time.perf_counter(), []
        with tqdm(desc=self.name, total=self.every or None, leave=False, disable=None) as bar:
            while (self.seconds < seconds and not wrong) and (some := list(itertools.islice(self.proofs, 8 * workers))):
                wrong = [text for text in pool.map(_try, some, chunksize=4) if text]
                self.proved += len(some)
                self.seconds = time.perf_counter() - began
                bar.update(len(some))
        return wrong

    def cells(self) -> list[str]:
        """Return a line of the table."""
        return [
            self.name,
            f"{self.sizes[0]} to {self.sizes[-1]}",
            f"{self.proved:,}",
            f"{self.every:,}" if self.every else "-",
            f"{self.seconds:.0f}",
        ]


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.proof", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="for all kinds together (default: 10)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: one a core)")
    parser.add_argument("--seed", type=int, default=0, help="for what is drawn at random")
    settings = parser.parse_args()
    rows = [
        Row("single operations, every root", range(2, 65), _with_every_root),
        Row("sequences of two", range(2, 9), _two),
        Row("sequences of three", range(2, 7), _drawn(_three, settings.seed)),
        Row("two operations in each of several lanes", range(2, 5), _drawn(_lanes, settings.seed)),
        Row("four calls on communicators with common ranks", range(2, 6), _drawn(_communicators, settings.seed)),
    ]
    wrong: list[str] = []
    with ProcessPoolExecutor(settings.workers) as pool:
        for row in rows:
            wrong += row.work(pool, 60 * settings.minutes / len(rows), settings.workers)
    lines = [["what", "ranks", "proved", "of", "seconds"], *(row.cells() for row in rows)]
    sys.stdout.write("\n".join([*table(lines), *wrong, ""]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
