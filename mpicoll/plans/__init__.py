"""Plans of collectives: what each rank does, as tables of instructions; see :mod:`mpicoll.kernels.plan`."""

from mpicoll.plans.node import COLLECTIVES, make

__all__ = ["COLLECTIVES", "make"]
