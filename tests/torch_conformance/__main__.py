"""Run tests of others, unchanged, on the ranks of one launch: ``python -m tests.torch_conformance``.

- ``torch``: PyTorch's own tests of ``torch.distributed`` (``torch.testing._internal.distributed.distributed_test``).
  They need the package expecttest.
- ``torchft``: torchft's tests of process groups (``torchft.process_group_test``). They need the packages torchft and
  parameterized.

The table says how many passed, were skipped by their own conditions, and failed, with the reasons.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.mpirun import run
from tests.torch_conformance.records import BEGUN, FAILED, PASSED, SKIPPED

SUITES = ("torch", "torchft")
UNFINISHED = "unfinished"


def outcomes(folder: Path) -> dict[str, tuple[str, str]]:
    """Return for each test how it ended on the ranks together, and the reasons of those that did not pass."""
    found: dict[str, dict[str, list[str]]] = {}
    for path in sorted(folder.glob("rank-*.jsonl")):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            of_test = found.setdefault(record["name"], {})
            if "how" in record:
                of_test.setdefault(record["how"], []).append(f"{path.stem}: {record['why']}")
            else:
                of_test.setdefault(BEGUN, []).append(path.stem)
    return {name: _together(of_test) for name, of_test in found.items()}


def _together(of_test: dict[str, list[str]]) -> tuple[str, str]:
    ended = sum(len(of_test.get(how, [])) for how in (PASSED, SKIPPED, FAILED))
    if FAILED in of_test:
        return FAILED, "\n".join(of_test[FAILED])
    if ended < len(of_test[BEGUN]):
        return UNFINISHED, ""
    if SKIPPED in of_test and PASSED not in of_test:
        return SKIPPED, of_test[SKIPPED][0].partition(": ")[2]
    return PASSED, ""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.torch_conformance",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("suite", nargs="?", choices=SUITES, default="torch", help="whose tests (default: torch)")
    parser.add_argument("--ranks", type=int, default=3, help="number of ranks (default: 3, as PyTorch's tests have)")
    parser.add_argument("--tests", default="", metavar="PATTERN", help="a part of their names (default: all)")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for all (default: %(default)s)")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="mpicoll-torch-") as name:
        program = ["-m", f"tests.torch_conformance.{arguments.suite}_program", arguments.tests, name]
        done = run(arguments.ranks, program, timeout=arguments.timeout, test_timeout=None)
        found = outcomes(Path(name))
    counts = Counter(how for how, _ in found.values())
    for test, (how, why) in sorted(found.items()):
        if how in (FAILED, UNFINISHED):
            print(f"--- {how}: {test}\n{why}")
    for reason, count in Counter(why for how, why in found.values() if how == SKIPPED).most_common():
        print(f"skipped {count}: {reason}")
    print(
        f"{arguments.ranks} ranks: "
        + ", ".join(f"{counts[how]} {how}" for how in (PASSED, SKIPPED, FAILED, UNFINISHED))
    )
    if done.returncode or done.hung or not found:
        print(done.text[-5000:])
    good = found and not done.returncode and not done.hung and not counts[FAILED] and not counts[UNFINISHED]
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
