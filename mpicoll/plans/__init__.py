"""Plans of collectives: each rank's table of instructions; see :mod:`mpicoll.kernels.instructions`."""

from mpicoll.plans.render_plan import draw
from mpicoll.plans.shared_memory_plans import COLLECTIVES, make
from mpicoll.plans.tell_plan import make_tell

__all__ = ["COLLECTIVES", "draw", "make", "make_tell"]
