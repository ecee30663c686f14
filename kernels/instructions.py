"""Instruction set of plans: what a rank does in one collective, as a table of int64 words.

A plan is an array of shape ``(rows, ROW_WORDS)``. Row 0 is the header, every other row one instruction; execution
begins at row 1. `executor` runs plans, :mod:`mpicoll.plans` makes them. A plan holds neither addresses nor counts:
those stand in the words of the operation (`operation_words`), so that one plan serves all calls of a collective, and
all lanes.

An instruction names ranges of elements and places in memory. A long vector passes in *segments*; of the present
segment a range is

- SEGMENT: all of it;
- CHUNK i: the i-th of `size` aligned blocks of it;
- PART i: what it has of part i, where every rank owns a part of the vector;
- TILE: what the innermost loop (TILES) has come to.
"""

ROW_WORDS = 8
ROW_NBYTES = 8 * ROW_WORDS

# Header -----------------------------------------------------------------------------------------------------------
(
    READ,  # the rank whose sendbuf other ranks read, or ALL, or NONE
    WRITTEN,  # the rank whose recvbuf other ranks write, or ALL, or NONE
    BY_PARTS,  # 1: a segment has a range of every part, 0: it is a range of the vector
    SEND_PART,  # 1: sendbuf holds only the rank's own part
    RECV_PART,  # 1: recvbuf holds only the rank's own part
    TURNS,  # 1: no result passes through stages: who has copied its input to one waits for nobody who reads it
    SPLIT,  # parts of which an input stage holds a segment
    EARLY,  # 1: segments are short, so that a rank fills one while another empties the one before
) = range(ROW_WORDS)
ALL, NONE = -1, -2
"""In place of a rank."""
COUNTED = 2
"""Operand of ENTER: PART_NBYTES are put into the own slot, of which not all ranks know the number."""

# Instructions -----------------------------------------------------------------------------------------------------
(
    ENTER,  # wait until all ranks have started an operation before, then write the record; operand: 1 if long, COUNTED
    STARTED,  # publish "started": the record, and what was copied since ENTER, may be read
    MEET,  # wait until a rank, or ALL, has started, and compare the calls; the own rank: do not wait
    RESOLVE,  # find out how the published buffers are reached: 0 for all, INPUTS or OUTPUTS
    AT_WORK,  # announce that the buffers of a rank, or of ALL, are used from now on
    DONE,  # publish "done"
    WAIT_DONE,  # wait until a rank, or ALL, is done
    COPY,  # to place <- from place
    DELIVER,  # the same, passed over where an OUTPUT is reached through stages
    REDUCE,  # to place <- from places of several ranks, in rank order
    IF,  # pass over so many rows unless a condition holds: condition, rows
    TILES,  # loop over the tiles of a range: -, -, index, rows of the body, -, -, kind of range
    AGAIN,  # end of the loop's body: rows back to TILES
    SEGMENTS,  # go on with the next segment, at row 1, unless this was the last
    END,
    # The rows of plans that are bound to memory, see `messages`; END is the only other one that they have.
    STARTALL,  # start persistent messages: count, requests, function
    TESTALL,  # wait until they are complete: count, requests, function, flag, statuses
    REDUCE_BOUND,  # out <- left OP right: count, itemsize, function
    COPY_BOUND,  # out <- left: count, itemsize
    CALL,  # what only the interpreter can do
    # The rows of plans of plans, see `composition`, which have those above as well.
    START_PART,  # start another plan: its job, words of the operation or 0
    FINISH_PART,  # wait until it has ended, and let a third one progress meanwhile: its job, the third one's or 0
    # Rows of plans whose messages are compressed, see `messages`.
    NEXT_KEYS,  # number the operation, and write the keys of its random choices: keys, stream, counter
    ENCODE,  # payload out <- elements left: count, itemsize, function, words of the codec's call
    DECODE,  # elements out <- payload left, or add them: the same
    SEND_PREFIXED,  # start messages of lengths in memory: count, words of the messages, function, counter of bytes
    # Rows of Gatherv and Scatterv in one round, see `counted_parts`: -, -, function.
    OFFER_PARTS,  # write to the record where parts for others are, and copy them, or their begin, to there
    GIVE_PARTS,  # copy what follows, and wait until others have what they copy from the own buffers
    TAKE_PARTS,  # check the lengths of parts, and copy them to recvbuf
) = range(1, 30)

# Operands of MEET, AT_WORK, WAIT_DONE (a rank) and ENTER, IF, AGAIN stand in FIRST; of IF and TILES also in ROWS.
OPERATION, FIRST, ROWS = 0, 1, 2
# Operands of COPY and DELIVER: space, rank and index of each place, and the kind of both ranges.
TO, TO_RANK, TO_INDEX, FROM, FROM_RANK, FROM_INDEX, KIND = range(1, 8)
# REDUCE takes a range of ranks in the place of FROM_RANK and FROM_INDEX, and both ranges have index TO_INDEX.
FROM_FIRST, FROM_LAST = FROM_RANK, FROM_INDEX

# Rows that are bound to memory: counts, and addresses of everything else.
BOUND_COUNT, BOUND_REQUESTS, BOUND_FUNCTION, BOUND_FLAG, BOUND_STATUSES = range(1, 6)
_, BOUND_OUT, _, BOUND_LEFT, BOUND_RIGHT, BOUND_ITEMSIZE = range(1, 7)
_, BOUND_JOB, BOUND_WORDS, BOUND_ASIDE = range(1, 5)

# Words of a codec's call, at the address in BOUND_RIGHT of ENCODE and DECODE: room for the payload in bytes; settings
# and their number; the address of the payload's length if that varies, else 0; keys and first element of ENCODE; 1 if
# DECODE adds.
(
    CODEC_NBYTES,
    CODEC_SETTINGS,
    CODEC_SETTINGS_LENGTH,
    CODEC_LENGTH,
    CODEC_KEYS,
    CODEC_FIRST,
    CODEC_ADD,
) = range(7)
CODEC_WORDS = 7
# Words of a message of SEND_PREFIXED: memory, which begins with its length less these 8 bytes; arguments of MPI_Isend.
MESSAGE_MEMORY, MESSAGE_DATATYPE, MESSAGE_PEER, MESSAGE_TAG, MESSAGE_COMM, MESSAGE_REQUEST = range(6)
MESSAGE_WORDS = 6
MESSAGE_HEAD_NBYTES = 8
"""Bytes at the begin of a message whose length varies, which say how many follow."""

# Kinds of ranges
SEGMENT, CHUNK, PART, TILE = range(4)

# Spaces
(
    SEND,  # the own sendbuf
    RECV,  # the own recvbuf
    SLOT,  # a rank's slot, which holds its sendbuf if that is short
    INPUT,  # a rank's sendbuf, or the stage that its owner copied it to
    OUTPUT,  # a rank's recvbuf, or the own stage from which its owner copies it
    STAGED_INPUT,  # the own stage for input
    STAGED_OUTPUT,  # a rank's stage for output
    SCRATCH,  # private memory of one tile
) = range(8)

# Conditions
(
    INPUT_IS_STAGED,  # this rank has to copy its sendbuf to its stage
    OUTPUT_IS_STAGED,  # this rank has to copy its result from the others' stages
    OTHERS_ARE_STAGED,  # another rank does
    OUTPUT_IS_REMOTE,  # the recvbuf of rank CONDITION_RANK is reached by the system only
    IN_USE,  # others use this rank's buffers in the operation, or its only output stage in this segment
    IS_PUSHED,  # all ranks write to the recvbuf of rank CONDITION_RANK themselves, and nothing passes through stages
    IS_PULLED,  # they do not
    MAY_DIVIDE,  # nothing passes through stages in a blocking operation, so that all ranks are at work on it
    IS_DIVIDED,  # so, and all ranks can write to the recvbuf of rank CONDITION_RANK
    IS_UNDIVIDED,  # not so
) = range(10)
INPUTS, OUTPUTS = 1, 2
"""Operand of RESOLVE for sendbufs or recvbufs only."""
CONDITION_RANK = 3
"""Operand of IF for conditions about a rank."""
