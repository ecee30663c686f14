"""A benchmark of one rank whose ``auto`` gets three elements wrong."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from mpi4py import MPI

from bench import harness
from bench.benchmark_options import make_parser
from bench.result_files import Case


class Wrong:
    case = Case("allreduce", 80, 10, "float64", 1)

    def __init__(self) -> None:
        self.result = np.zeros(10)
        self.calls: dict[str, Callable[[], None]] = {"native": self._right, "auto": self._wrong}

    def _right(self) -> None:
        self.result[:] = 1

    def _wrong(self) -> None:
        self.result[:7] = 1

    def wrong(self, contender: str) -> int:
        self.result[:] = 0
        self.calls[contender]()
        return int(np.count_nonzero(self.result != 1))

    def detail(self, contender: str, medians: Mapping[str, float]) -> Mapping[str, Any]:
        return {"faster": medians[contender] < medians["native"]}

    def close(self) -> None:
        pass


arguments = make_parser("wrong_benchmark", __doc__).parse_args()
sys.exit(harness.run("wrong_benchmark", arguments, [Wrong], sys.argv[1:], MPI.Intracomm(MPI.COMM_SELF)))
