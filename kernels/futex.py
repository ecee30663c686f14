"""Sleep of a rank that waits for another one's record, where ranks share cores: a futex on the record's flag.

Yielding the core helps little where the system schedules the ranks in groups of their own, as Linux does with the
sessions in which MPICH's launcher starts them: of ranks that wait, each goes on until its group has had its time.

::

    the rank that waits                             the rank that is waited for
    sleepers += 1                                   flag = value
    seen = flag                                     fence
    if seen < wanted: sleep while flag is seen      if sleepers: wake all that sleep on flag
    sleepers -= 1

Each of them writes one word and then reads the other's, so that at least one sees what the other has written; and the
system compares the flag once more before it lets a rank sleep. A sleep has a limit all the same, since not only records
end a wait: a signal, the deadline, or a rank that withdraws.

Source: U. Drepper, Futexes Are Tricky, 2011, sections 2 and 5.
"""

import platform
import sys

from .atomics import fence, fetch_add, load, load_acquire, system_call
from .decorators import DISABLED, helper
from .operation_words import RECORD_SLEEPERS, SLEEP_LIMIT, get

_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "loongarch64": 98, "ppc64le": 221}
_FUTEX = _NUMBERS.get(platform.machine(), 0)
"""Number of the system call; 64-bit words are compared by their low half, which is first in memory here."""
AVAILABLE = sys.platform.startswith("linux") and sys.byteorder == "little" and _FUTEX > 0 and not DISABLED
"""True if ranks can sleep here."""
_WAIT, _WAKE = 0, 1
"""Operations of the call, for memory that processes share."""
_ALL = (1 << 31) - 1
_LOW_HALF = (1 << 32) - 1


@helper
def sleep_until(job, flag, wanted):
    """Sleep until a record's flag changes, for SLEEP_LIMIT at most; return True if the flag is as large as wanted."""
    sleepers = flag + 8 * RECORD_SLEEPERS
    fetch_add(sleepers, 1)
    fence()
    seen = load_acquire(flag)
    if seen < wanted:
        system_call(_FUTEX, flag, _WAIT, seen & _LOW_HALF, get(job, SLEEP_LIMIT), 0, 0)
        seen = load_acquire(flag)
    fetch_add(sleepers, -1)
    return seen >= wanted


@helper
def wake_sleepers(flag):
    """Wake the ranks that sleep until this rank's flag, which has just been written, changes."""
    fence()
    if load(flag + 8 * RECORD_SLEEPERS):
        system_call(_FUTEX, flag, _WAKE, _ALL, 0, 0, 0)
