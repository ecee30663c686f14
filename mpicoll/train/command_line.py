"""Frame of the commands that train: errors, interrupts and exit statuses of all ranks."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from mpicoll.command_frame import OutputFailed, end_output, run_framed
from mpicoll.environment import finalize_without_dead_ranks, launched_rank, launcher_mismatch
from mpicoll.errors import MpicollError, TrainingError
from mpicoll.train.options import HelpRequested
from mpicoll.train.process_facts import limit_threads
from mpicoll.train.run_report import complain, say

if TYPE_CHECKING:
    from mpi4py import MPI

_INTERRUPTED = 130


def run_on_all_ranks(work: Callable[[MPI.Intracomm], None]) -> int:
    """Call ``work(MPI.COMM_WORLD)`` and return the exit status.

    Rank 0 prints an error that all ranks raise, in one line. An error on one rank is printed by that rank and ends the
    job. The number of threads is limited before NumPy is imported.
    """
    limit_threads()
    finalize_without_dead_ranks()
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    problem = launcher_mismatch(world.size, MPI.get_vendor()[0])
    if problem is not None:
        return _refuse(problem, 1, launched_rank())
    try:
        work(world)
        return 0
    except HelpRequested as text:
        return run_framed("mpicoll", partial(_show, str(text))) if world.rank == 0 else 0
    except TrainingError as error:
        if error.of_one_rank and world.size > 1:
            return _end_job(f"error: rank {world.rank}: {error}", error.exit_status)
        return _refuse(str(error), error.exit_status, world.rank)
    except KeyboardInterrupt:
        return _end_job(f"rank {world.rank}: interrupted", _INTERRUPTED)
    except MpicollError as error:
        return _end_job(f"error: rank {world.rank}: {type(error).__name__}: {error}", 1)
    except OutputFailed as failure:
        status = end_output("mpicoll", failure.__cause__)
        return _end_job("", status) if world.size > 1 else status
    except BaseException:
        return _end_job(f"rank {world.rank}:\n{traceback.format_exc()}", 1)


def _show(text: str) -> int:
    say(text)
    return 0


def _refuse(message: str, status: int, rank: int) -> int:
    if rank == 0:
        complain(f"error: {message}")
    return status


def _end_job(text: str, status: int) -> int:
    from mpicoll.communicator import abort

    abort.end(f"{text}\n" if text else "", status)
    return status
