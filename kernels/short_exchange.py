"""Alltoallw and Alltoallv of short blocks on a node in one compiled call: offer, exchange the records, take."""

from .block_exchange import offer_blocks, take_blocks
from .decorators import short_kernel
from .dispatch import make_call
from .operation_words import ALLTOALL, DONE

TAKEN = 32
"""Added to what `take` returns, -1 included; less than 31 is the status of an Alltoall that has not ended."""


@short_kernel(*["int64"] * 4)
def exchange(words, table, offers, arrived):
    """Offer blocks, exchange the records by an Alltoall, and take the blocks of the others.

    The interpreter lock is held meanwhile, which is for blocks that are short.

    Parameters
    ----------
    words : int
        Address of the words of an exchange.
    table : int
        Address of the communicator's table for plain calls.
    offers, arrived : int
        What `id` says of the arrays whose addresses are OFFERS and ARRIVED.

    Returns
    -------
    int
        TAKEN plus what `block_exchange.take` returns; or the status of the Alltoall, as `dispatch.call` returns it, if
        that is not DONE: then the blocks have been offered and not been taken.
    """
    offer_blocks(words)
    status = make_call(table, ALLTOALL, offers, arrived, 0, 0)
    return TAKEN + take_blocks(words) if status == DONE else status
