"""Plans of collectives: each rank's table of instructions; see :mod:`mpicoll.kernels.instructions`."""

from mpicoll.plans.counted_plans import make_counted
from mpicoll.plans.render_plan import draw, draw_counted
from mpicoll.plans.shared_memory_plans import COLLECTIVES, make

__all__ = ["COLLECTIVES", "draw", "draw_counted", "make", "make_counted"]
