"""Offers of blocks to the other ranks of a node, see :mod:`mpicoll.kernels.block_exchange`."""

from .atomics import load, store
from .decorators import helper, kernel_for, linked
from .exchange_words import (
    CHUNK,
    DIRECT,
    INLINE,
    INLINE_NBYTES,
    KINDS,
    MARK,
    MAY_DIRECT,
    OFFER_KIND,
    OFFER_LENGTH,
    OFFER_MARK,
    OFFER_NBYTES,
    OFFER_PLACE,
    OFFER_ROUNDS,
    OFFERS,
    RANK,
    REMOTE,
    ROUND,
    SEND_BASE,
    SENDS,
    SHORTEST_RUN,
    SIZE,
    SOURCE,
    STAGE,
    STAGED,
    TARGET,
    TYPE,
    TYPE_BIT,
    is_inside,
    layout_for,
    round_nbytes,
    seek_packed,
)
from .strided_copy import ADDRESS, LAYOUT_WORDS, NBYTES, RUN, copy_between, reach, seek


@helper
def _pack(words, rank, address, first, nbytes):
    """Copy bytes of the block for a rank to contiguous memory."""
    target, source = words + 8 * TARGET, words + 8 * SOURCE
    seek_packed(words, target, address, nbytes)
    seek(source, layout_for(words, SENDS, rank), load(words + 8 * SEND_BASE), first)
    copy_between(target, source, nbytes)


@helper
def _stage_for(words, rank, number):
    """Return where the block for a rank is staged in a round."""
    half = (number & 1) * load(words + 8 * SIZE)
    return load(words + 8 * STAGE) + (half + rank) * load(words + 8 * CHUNK)


@helper
def _where_it_is(words, layout):
    """Return DIRECT or REMOTE for a block that others copy from where it is, else STAGED."""
    if load(words + 8 * MAY_DIRECT) == 0:
        return STAGED
    low, high = reach(layout)
    base, shortest = load(words + 8 * SEND_BASE), load(words + 8 * SHORTEST_RUN)
    if is_inside(words, load(words + 8 * RANK), base + low, base + high):
        return DIRECT
    return REMOTE if shortest and load(layout + 8 * RUN) >= shortest else STAGED


@helper
def may_offer_remote(words):
    """Return whether a block would be offered REMOTE with the present SHORTEST_RUN."""
    for rank in range(load(words + 8 * SIZE)):
        layout = layout_for(words, SENDS, rank)
        is_sent = rank != load(words + 8 * RANK) and load(layout + 8 * NBYTES) > INLINE_NBYTES
        if is_sent and _where_it_is(words, layout) == REMOTE:
            return True
    return False


@helper
def _offer_to(words, rank, record):
    """Offer a block to a rank; return in how many rounds it can be taken."""
    layout = layout_for(words, SENDS, rank)
    nbytes, chunk = load(layout + 8 * NBYTES), load(words + 8 * CHUNK)
    kind = load(words + 8 * TYPE) << TYPE_BIT
    store(record + 8 * OFFER_MARK, load(words + 8 * MARK))
    store(record + 8 * OFFER_LENGTH, nbytes)
    if nbytes <= INLINE_NBYTES:
        store(record + 8 * OFFER_KIND, kind | INLINE)
        _pack(words, rank, record + 8 * OFFER_PLACE, 0, nbytes)
        return 0
    where = _where_it_is(words, layout)
    if where != STAGED:
        store(record + 8 * OFFER_KIND, kind | where)
        for word in range(LAYOUT_WORDS):
            store(record + 8 * (OFFER_PLACE + word), load(layout + 8 * word))
        store(record + 8 * (OFFER_PLACE + ADDRESS), load(words + 8 * SEND_BASE) + load(layout + 8 * ADDRESS))
        return 1
    store(record + 8 * OFFER_KIND, kind | STAGED)
    store(record + 8 * OFFER_PLACE, _stage_for(words, rank, 0))
    _pack(words, rank, _stage_for(words, rank, 0), 0, round_nbytes(words, nbytes, 0))
    return (nbytes + chunk - 1) // chunk


@linked("void", "int64")
def offer_blocks(words):
    """Write the records of an exchange, and pack what is staged in the first round.

    Parameters
    ----------
    words : int
        Address of the words of an exchange.
    """
    size, own, rounds = load(words + 8 * SIZE), load(words + 8 * RANK), 0
    records = load(words + 8 * OFFERS)
    for rank in range(size):
        if rank != own:
            rounds = max(rounds, _offer_to(words, rank, records + OFFER_NBYTES * rank))
    for rank in range(size):
        store(records + OFFER_NBYTES * rank + 8 * OFFER_ROUNDS, rounds)
    own_record = records + OFFER_NBYTES * own
    store(own_record + 8 * OFFER_MARK, load(words + 8 * MARK))
    store(own_record + 8 * OFFER_LENGTH, load(layout_for(words, SENDS, own) + 8 * NBYTES))
    store(own_record + 8 * OFFER_KIND, INLINE)


@kernel_for("int64")
def offer_round(words):
    """Pack what is staged in round ROUND, which is not the first."""
    number, own = load(words + 8 * ROUND), load(words + 8 * RANK)
    for rank in range(load(words + 8 * SIZE)):
        record = load(words + 8 * OFFERS) + OFFER_NBYTES * rank
        if rank != own and load(record + 8 * OFFER_KIND) & KINDS == STAGED:
            nbytes = round_nbytes(words, load(record + 8 * OFFER_LENGTH), number)
            if nbytes:
                _pack(words, rank, _stage_for(words, rank, number), number * load(words + 8 * CHUNK), nbytes)
