"""Persistent collectives inside functions that Numba compiles.

.. code-block:: python

    import mpicoll.jit

    plan = comm.Allreduce_init(x, y)  # of any communicator, also of a part of the ranks

    @numba.njit
    def iterate(plan, x, y, steps):
        for _ in range(steps):
            x[:] = work(x)
            mpicoll.jit.run(plan)  # y is the sum of all x
            x -= y / y.size

    iterate(plan, x, y, 1000)

On shared memory :func:`run` stays in compiled code unless a rank keeps the others waiting; then, and for plans of
messages, Python waits, with the deadline and the errors of the communicator. Importing this package imports Numba.
"""

from __future__ import annotations

from mpicoll.collectives.requests import PersistentRequest
from mpicoll.jit import plan_type

__all__ = ["last_error", "run"]


def run(plan: PersistentRequest) -> None:
    """Start a persistent collective and wait until it is complete; in compiled functions and in Python.

    Parameters
    ----------
    plan
        What ``Allreduce_init``, ``Bcast_init``, ... return. It is an argument of the compiled function; Numba compiles
        one function for all plans.

    Raises
    ------
    RuntimeError
        In compiled functions, if it fails, and after Ctrl-C; :func:`last_error` returns the exception, which the
        program should raise or treat. In Python the exception itself is raised.
    """
    plan.Start()
    plan.Wait()


def last_error() -> BaseException | None:
    """Return the exception of the last call in a compiled function that has failed; None if none has."""
    return plan_type.last_error


plan_type.implement(run)
