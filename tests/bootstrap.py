"""What every rank of a test run starts with: leave the process id, answer SIGUSR1 with a stack, run the program."""

from __future__ import annotations

import faulthandler
import os
import runpy
import signal
import sys
from pathlib import Path

RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID")


def _own_folder(path: Path) -> None:
    """Give pytest a root for temporary folders that no other rank cleans up at the same time."""
    path.mkdir()
    os.environ["PYTEST_DEBUG_TEMPROOT"] = str(path)


def main() -> None:
    folder = Path(os.environ["MPICOLL_TEST_FOLDER"])
    rank = next((os.environ[name] for name in RANK_VARIABLES if name in os.environ), str(os.getpid()))
    (folder / f"rank-{rank}.pid").write_text(str(os.getpid()))
    _own_folder(folder / f"rank-{rank}")
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=(folder / f"rank-{rank}.stack").open("w"), all_threads=True)
    if os.environ.get("MPICOLL_TEST_QUIET") and rank != "0":
        quiet = os.open(folder / f"rank-{rank}.out", os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
    del sys.argv[0]
    sys.path[0] = ""
    if sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    elif sys.argv[0] == "-c":
        code = sys.argv.pop(1)
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


main()
