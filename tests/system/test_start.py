"""What a rank imports and loads until its first results: no Numba if kernels are on disk, and no unused kernels."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench import launch
from mpicoll.kernels import machine_code

loads = pytest.mark.skipif(machine_code.obstacle() != "", reason=machine_code.obstacle())
PROGRAM = """
import sys
import numpy as np
from mpi4py import MPI
import mpicoll
from mpicoll.kernels.counted_parts import exchange_parts

comm = mpicoll.Intracomm(MPI.COMM_WORLD)
for count in (1, 1000, 1_000_000):
    x, y = np.full(count, comm.rank, np.float32), np.empty(count, np.float32)
    comm.Allreduce(x, y)
    assert (y == sum(range(comm.size))).all()
    comm.Iallreduce(x, y).Wait()
    comm.Bcast(x, 0)
plan = comm.Allreduce_init(x, y)
plan.Start()
plan.Wait()
assert comm.allgather({"rank": comm.rank})[-1] == {"rank": comm.size - 1}
assert comm.allreduce(1.5) == 1.5 * comm.size
loaded = f"Numba: {'numba' in sys.modules}, Gatherv: {'address' in vars(exchange_parts)}"
sys.stdout.write(f"{loaded}\\n")  # at once: other ranks write, too
"""


@loads
@pytest.mark.parametrize("variables", [{}, {"MPICOLL_NODE": "off"}], ids=["shared memory", "messages"])
def test_collectives_load_what_they_need(variables: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    for _ in range(2):  # the first may have to compile
        done = subprocess.run(
            launch.command(3, [str(path)]),
            env={**launch.clean_environment(), **variables},
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["Numba: False, Gatherv: False"] * 3


@loads
def test_training_needs_no_numba() -> None:
    code = """
import sys
from mpicoll.train.__main__ import main
try:
    main(["--steps", "4"])
except SystemExit as end:
    assert not end.code
print("numba" in sys.modules)
"""
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280, check=False)
        assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "False"
