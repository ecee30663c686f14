"""Words of an exchange of blocks between the ranks of a node, see :mod:`mpicoll.kernels.block_exchange`."""

from .atomics import load, store
from .decorators import helper
from .operation_words import PEER_WORDS, SEGMENT_ADDRESS, SEGMENT_NBYTES
from .process_copy import VECTORS_WORDS
from .strided_copy import ADDRESS, CURSOR_WORDS, DIMENSIONS, LAYOUT_WORDS, NBYTES, RUN, seek

(
    SIZE,
    RANK,
    PEERS,  # address of PEER_WORDS words a rank
    SENDS,  # addresses of a layout a rank: what is sent, what is received
    RECVS,
    SEND_BASE,  # to which their addresses are relative
    RECV_BASE,
    OFFERS,  # addresses of the records: own ones, those of all ranks
    ARRIVED,
    STAGE,  # address of 2 * size * CHUNK bytes in the own segment
    CHUNK,  # bytes of a block that are staged in one round
    MAY_DIRECT,  # 0 if blocks of the own segment are staged too, since the result overwrites them
    ASKED,  # METHOD + 1 where the caller has asked for it, else 0
    TRIALS,  # address of the job of trials of methods; 0: no copies between processes
    SHORTEST_RUN,  # bytes of a run from which on blocks in private memory are offered where they are; 0: none are
    MARK,  # which collective this is
    TYPE,  # element type of all blocks, 0 if they have several
    ROUND,
    ROUNDS,  # -1 if a rank has made another call
    WRONG_RANK,  # whose block, or record, cannot be used, -1 if none
    WRONG_NBYTES,  # how long that block is, or one of the reasons below
    EXPECTED_NBYTES,  # how long it should be
    ROWS,  # address of two layouts a rank, for what is sent and received, where compiled code reads specifications
    ERROR,  # address of one word: 0, or the number of an error by which all ranks hear of it
    OFFERS_ARRAY,  # objects: the arrays at OFFERS, ARRIVED and ERROR, MPI.IN_PLACE and MPI.MAX
    ARRIVED_ARRAY,
    ERROR_ARRAY,
    IN_PLACE,
    MAXIMUM,
    IS_OPEN,  # 1 while other ranks may wait for this one in an exchange that has begun
    EXCHANGE_WORDS,
) = range(31)
"""Words of an exchange; memory for cursors, a layout, and lists of pieces follows."""
TARGET, SOURCE = EXCHANGE_WORDS, EXCHANGE_WORDS + CURSOR_WORDS
PACKED = SOURCE + CURSOR_WORDS
VECTORS = PACKED + LAYOUT_WORDS
ALL_WORDS = VECTORS + VECTORS_WORDS

ALLTOALLW, ALLTOALLV = 0x6D7069636F6C6C77, 0x6D7069636F6C6C76
"""Marks, by which a rank knows that a record is one of this collective."""
OFFER_NBYTES = 512
DAMAGED, OF_ANOTHER_TYPE, OUT_OF_REACH = -1, -2, -3
"""Reasons: the record is wrong; only the type differs; the system does not copy this memory between processes."""
OFFER_MARK, OFFER_LENGTH, OFFER_KIND, OFFER_ROUNDS, OFFER_PLACE = range(5)
"""Words of a record; OFFER_KIND has the element type, too. At the last is a layout, where the stage is, or the data."""
TYPE_BIT = 8
INLINE_NBYTES = OFFER_NBYTES - 8 * OFFER_PLACE
INLINE, DIRECT, STAGED, REMOTE = range(4)
KINDS = (1 << TYPE_BIT) - 1


@helper
def layout_for(words, which, rank):
    """Return the layout of the block for or from a rank; `which` is SENDS or RECVS."""
    return load(words + 8 * which) + 8 * LAYOUT_WORDS * rank


@helper
def nbytes_of(words, which):
    """Return the bytes of all blocks that are sent or received; `which` is SENDS or RECVS."""
    total = 0
    for rank in range(load(words + 8 * SIZE)):
        total += load(layout_for(words, which, rank) + 8 * NBYTES)
    return total


@helper
def seek_packed(words, cursor, address, nbytes):
    """Set a cursor to contiguous memory."""
    layout = words + 8 * PACKED
    store(layout + 8 * ADDRESS, 0)
    store(layout + 8 * NBYTES, nbytes)
    store(layout + 8 * RUN, max(nbytes, 1))
    store(layout + 8 * DIMENSIONS, 0)
    seek(cursor, layout, address, 0)


@helper
def peer_of(words, rank, word):
    """Return a word of what is known about a rank."""
    return load(load(words + 8 * PEERS) + 8 * (PEER_WORDS * rank + word))


@helper
def is_inside(words, rank, first, behind):
    """Return whether addresses of a rank lie in its segment."""
    start = peer_of(words, rank, SEGMENT_ADDRESS)
    return start <= first <= behind <= start + peer_of(words, rank, SEGMENT_NBYTES)


@helper
def round_nbytes(words, nbytes, number):
    """Return how many bytes of a staged block are there in a round."""
    chunk = load(words + 8 * CHUNK)
    return min(chunk, max(0, nbytes - number * chunk))
