"""Plans of collectives: each rank's table of instructions; see :mod:`mpicoll.kernels.instructions`."""

from mpicoll.plans.render_plan import draw
from mpicoll.plans.shared_memory_plans import COLLECTIVES, make

__all__ = ["COLLECTIVES", "draw", "make"]
