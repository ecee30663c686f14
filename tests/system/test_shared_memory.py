"""Shared memory in whole programs: without one or the other way to it, and at the interpreter's end."""

from __future__ import annotations

import pytest

from tests import extent
from tests.mpirun import run

SWITCHES = {
    "no segments": {"MPICOLL_SEGMENTS": "off"},
    "no copying": {"MPICOLL_TRANSFER": "off"},
    "slots only": {"MPICOLL_SEGMENTS": "off", "MPICOLL_TRANSFER": "off"},
    "nothing": {"MPICOLL_NODE": "off"},
}
FILES = ["tests/mpi/test_shared.py", "tests/mpi/test_shared_calls.py::test_operands_are_combined_in_rank_order"]


@pytest.mark.parametrize("name", extent.first(1, ["slots only", "nothing", "no segments"]))
def test_every_way_gives_the_same_results(name: str) -> None:
    arguments = ["-m", "pytest", "-q", "--with-mpi", "-p", "no:cacheprovider", *FILES]
    outcome = run(4 if extent.ALL else 2, arguments, timeout=240, test_timeout=90, environment=SWITCHES[name])
    assert not outcome.hung, outcome.report
    assert outcome.returncode == 0, outcome.text[-6000:]


WAYS = """
import sys
import numpy as np
from mpi4py import MPI
import mpicoll
from mpicoll.kernels import operation_words as job
comm = mpicoll.Intracomm(MPI.COMM_WORLD)
node = comm._scope.channel.node
way = None if node is None else (node.method, node.segments, comm.choice("allreduce", 1 << 24))
sys.stdout.write(f"way {way}\\n")
sys.stdout.flush()
"""


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("nothing", "None"), ("slots only", "(2, False, 'ring')"), ("no copying", "(0, True, 'shared')")],
)
def test_the_switches_do_what_they_say(name: str, wanted: str) -> None:
    outcome = run(3, ["-c", WAYS], environment=SWITCHES[name])
    assert outcome.stdout.count(f"way {wanted}") == 3, outcome.text


def test_a_rank_that_cannot_open_the_common_file_leaves_messages_to_all() -> None:
    code = "import pathlib\nfrom mpi4py import MPI\nfrom mpicoll.shared_memory import common_file\n"
    code += "if MPI.COMM_WORLD.rank == 1: common_file.DIRECTORY = pathlib.Path('/nowhere')\n"
    check = "x = np.ones(300_000); comm.Allreduce(MPI.IN_PLACE, x); assert (x == 3).all()\n"
    check += "comm = comm.Split(0); comm.Allreduce(MPI.IN_PLACE, x); assert (x == 9).all()\n"
    outcome = run(3, ["-c", code + WAYS + check], timeout=60, environment=SWITCHES["no segments"])
    assert outcome.returncode == 0, outcome.text
    assert outcome.stdout.count("way None") == 3, outcome.text
    assert "shared memory is not used: not every rank can open a file" in outcome.text


def test_ranks_that_are_told_different_things_take_the_way_that_all_can() -> None:
    code = "import os; os.environ['MPICOLL_{0}'] = 'off' if os.environ.get('{1}', '0') == '1' else 'on'\n"
    rank = "PMI_RANK' if 'PMI_RANK' in os.environ else 'OMPI_COMM_WORLD_RANK"
    for switch in ("NODE", "ARENA", "TRANSFER"):
        check = "x = np.ones(300_000); comm.Allreduce(MPI.IN_PLACE, x); assert (x == 3).all()\n"
        outcome = run(3, ["-c", code.format(switch, rank) + WAYS + check], timeout=60)
        assert outcome.returncode == 0, outcome.text
        assert len({line for line in outcome.stdout.splitlines() if "way" in line}) == 1, outcome.text


def test_a_limit_on_the_address_space_of_one_rank_leaves_messages_to_all() -> None:
    code = "import os, resource\nfrom mpi4py import MPI\nif MPI.COMM_WORLD.rank == 1:\n"
    code += "    pages = int(open('/proc/self/statm').read().split()[0])\n"
    code += "    limit = pages * resource.getpagesize() + (256 << 20)\n"
    code += "    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
    check = "x = np.ones(300_000); comm.Allreduce(MPI.IN_PLACE, x); assert (x == 3).all()\n"
    outcome = run(3, ["-c", code + WAYS + check], timeout=60)
    assert outcome.returncode == 0, outcome.text
    assert outcome.stdout.count("way None") == 3, outcome.text
    assert "shared memory is not used: the limit on the address space leaves" in outcome.text


OUTLIVING = """
import gc, weakref
import numpy as np
from mpi4py import MPI
import mpicoll

comm = mpicoll.Intracomm(MPI.COMM_WORLD)
switch = mpicoll.shared_arrays()
switch.enable()


class Keeper:
    data = np.ones(50_000)

    def __init__(self):
        self.me, self.own = self, np.arange(30_000)

    def __del__(self):
        self.own = np.zeros(40_000) + 1


gc.disable()
in_module = np.zeros(100_000)
cycles = [Keeper() for _ in range(5)]
view = in_module[10:]
plan = comm.Allreduce_init(MPI.IN_PLACE, in_module)
plan.Start()
plan.Wait()
comm.Allreduce(MPI.IN_PLACE, Keeper.data)
assert (Keeper.data == comm.size).all()
Keeper()
weakref.finalize(view.base, lambda: None)
setattr(np, "kept by somebody else", np.ones(70_000))
{last}
"""
LAST = {
    "at the end": "",
    "switched off": "switch.disable()",
    "freed": "plan.Free(); del plan, in_module, view",
    "by exit": "import sys; sys.exit(0)",
    "at exit": "import atexit; atexit.register(lambda: np.ones(20_000) + Keeper.data[:20_000])",
}


@pytest.mark.parametrize("name", extent.first(3, ["at exit", "freed", "switched off", "at the end", "by exit"]))
def test_arrays_may_outlive_the_interpreter(name: str) -> None:
    outcome = run(2, ["-c", OUTLIVING.format(last=LAST[name])], timeout=60)
    assert not outcome.hung, outcome.report
    assert outcome.returncode == 0, outcome.text
    assert "Fatal" not in outcome.text


FORKING = """
import os
import numpy as np
from mpi4py import MPI
import mpicoll
from mpicoll.kernels import allocator as heap
from mpicoll.shared_memory import numpy_allocator as shared_arrays
from mpicoll.shared_memory import segment as segment

comm = mpicoll.Intracomm(MPI.COMM_WORLD)
home = segment.own()
inside = lambda a: 0 <= a.ctypes.data - home.address < home.nbytes
with mpicoll.shared_arrays():
    mine = np.ones(50_000)
    child = os.fork()
    if child == 0:
        words = shared_arrays.source().words.copy()
        fresh = np.zeros(50_000)
        good = not inside(fresh) and inside(mine) and (mine == 1).all()
        del mine
        good &= (shared_arrays.source().words == words).all()
        os._exit(0 if good else 1)
    _, status = os.waitpid(child, 0)
    assert status == 0, status
    other = np.zeros(50_000)
    assert inside(other) and (mine == 1).all()
comm.Allreduce(MPI.IN_PLACE, mine)
assert (mine == comm.size).all()
print("fine", flush=True)
"""


def test_a_forked_child_leaves_its_parents_arrays_alone() -> None:
    outcome = run(2, ["-c", FORKING], timeout=60)
    assert not outcome.hung, outcome.report
    assert outcome.returncode == 0, outcome.text
    assert outcome.stdout.count("fine") == 2
