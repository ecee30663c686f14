"""Method by which an exchange of blocks reaches private memory: stages, or copies between processes.

Each rank chooses for the blocks that it sends, and its records say how to take them. So trials of the methods, see
:mod:`mpicoll.kernels.method_trials`, need no agreement: every rank makes its own, in a job of one rank. Where ranks
send about as much as each other, their calls are counted alike, and they try at the same time.
"""

from .atomics import load, store
from .block_offers import may_offer_remote, offer_blocks
from .decorators import helper, kernel_for
from .dispatch import choice_for
from .exchange_words import ASKED, IS_OPEN, SENDS, SHORTEST_RUN, TRIALS, nbytes_of
from .method_trials import FIRST_BITS, begin_own_call, bit_length, end_own_call
from .operation_words import ALLTOALL, DONE, STAGE, TIMED, TRANSFER, put

_SHORTEST_RUN = 1024
"""Bytes of the shortest runs that the system copies between processes; each takes it some 100 ns."""


@helper
def choose_method(words, table):
    """Choose the method of an exchange that begins now, and note when it began if it is timed.

    Parameters
    ----------
    table
        Address of the communicator's table for plain calls, which has the method before any trial; 0: there is none.
    """
    trials, method, nbytes = load(words + 8 * TRIALS), load(words + 8 * ASKED), nbytes_of(words, SENDS)
    store(words + 8 * SHORTEST_RUN, _SHORTEST_RUN if trials else 0)
    if trials:
        put(trials, TIMED, 0)  # a call before this one may have failed
    if method == 0 and bit_length(nbytes) >= FIRST_BITS and may_offer_remote(words):  # else the method changes nothing
        first = choice_for(table, ALLTOALL, nbytes) & 3 if table else 0
        method = begin_own_call(trials, nbytes, first if first else STAGE + 1)
    if method != TRANSFER + 1:
        store(words + 8 * SHORTEST_RUN, 0)


@kernel_for("int64")
def begin_exchange(words):
    """Choose the method of an exchange without a table for plain calls, and offer its blocks."""
    choose_method(words, 0)
    store(words + 8 * IS_OPEN, 1)
    offer_blocks(words)


@helper
def end_timed(words):
    """Keep the time of an exchange that has succeeded on all ranks, if it is timed."""
    trials = load(words + 8 * TRIALS)
    if trials:
        end_own_call(trials, DONE)


@kernel_for("int64")
def end_exchange(words):
    """End an exchange as `end_timed` does."""
    end_timed(words)
