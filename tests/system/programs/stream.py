"""Make one allreduce after the other for ever, having written this process' number to the given folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
from mpi4py import MPI

import mpicoll

comm = mpicoll.Intracomm(MPI.COMM_WORLD, timeout=5.0)
data, shared = np.ones(100_000), comm.zeros(3000)
comm.Allreduce(data, np.empty_like(data))
Path(sys.argv[1], f"rank-{comm.rank}").write_text(str(os.getpid()))
while True:
    comm.Allreduce(MPI.IN_PLACE, shared)
    comm.Allreduce(data, np.empty_like(data))
