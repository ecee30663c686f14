"""Plans of collectives: what each rank does, as tables of instructions; see :mod:`mpicoll.kernels.plan`."""

from mpicoll.plans.node import COLLECTIVES, make
from mpicoll.plans.render import draw

__all__ = ["COLLECTIVES", "draw", "make"]
