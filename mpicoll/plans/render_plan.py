"""Rendering of plans as text: a rank's instructions, with their ranges and operands."""

from __future__ import annotations

from collections.abc import Iterator

from mpicoll.kernels import instructions as words
from mpicoll.plans.counted_plans import make_counted
from mpicoll.plans.plan_rows import PlanHeader, Row
from mpicoll.plans.shared_memory_plans import make

_NAMES = ("ENTER", "STARTED", "MEET", "RESOLVE", "AT_WORK", "DONE", "WAIT_DONE", "COPY", "DELIVER", "REDUCE", "IF",
          "TILES", "SEGMENTS", "END", "OFFER_PARTS", "GIVE_PARTS", "TAKE_PARTS")  # fmt: skip
_INSTRUCTIONS = {getattr(words, name): name for name in _NAMES}
_MEANINGS = {
    words.STARTED: "publish the record, and what was copied",
    words.DONE: "publish that this rank's part is done",
    words.SEGMENTS: "the same with the next segment, if the vector passes through stages",
    words.END: "",
}
_RESOLVED = {0: "each published buffer", words.INPUTS: "the sendbuf", words.OUTPUTS: "the recvbuf"}
_OF_PARTS = {
    ("gather", False): {
        words.OFFER_PARTS: "write place and length of the own part to the record; copy it to the slot if it fits",
        words.GIVE_PARTS: "copy further segments; wait for the root if it copies the part from where it is",
    },
    ("gather", True): {
        words.OFFER_PARTS: "write to the record that there is nothing",
        words.TAKE_PARTS: "compare all lengths and types with the counts; recvbuf <- the parts of all ranks",
    },
    ("scatter", False): {
        words.OFFER_PARTS: "write to the record that there is nothing",
        words.TAKE_PARTS: "wait for rank {root}; compare calls, length and type; recvbuf <- the own part",
    },
    ("scatter", True): {
        words.OFFER_PARTS: "slot <- lengths of all parts, and the parts if they fit; write their place to the record",
        words.GIVE_PARTS: "copy further segments; wait for all if they copy parts from where they are",
    },
}
"""Meanings of rows by collective, and of the root or not."""
_CONDITIONS = {
    words.INPUT_IS_STAGED: "the own sendbuf is private",
    words.OUTPUT_IS_STAGED: "the own recvbuf is private",
    words.OTHERS_ARE_STAGED: "the recvbuf of another rank is private",
    words.OUTPUT_IS_REMOTE: "only the system can access the recvbuf of rank {rank}",
    words.IN_USE: "other ranks use own buffers, or results pass through stages",
    words.IS_PUSHED: "every rank can write to the recvbuf of rank {rank}, and nothing passes through stages",
    words.IS_PULLED: "otherwise",
    words.MAY_DIVIDE: "nothing passes through stages, and the operation is a blocking one",
    words.IS_DIVIDED: "the same, and every rank can write to the recvbuf of rank {rank}",
    words.IS_UNDIVIDED: "otherwise",
}
_SPACES = {
    words.SEND: "sendbuf",
    words.RECV: "recvbuf",
    words.SLOT: "slot {rank}",
    words.INPUT: "sendbuf {rank}",
    words.OUTPUT: "recvbuf {rank}",
    words.STAGED_INPUT: "own stage",
    words.STAGED_OUTPUT: "result stage {rank}",
    words.SCRATCH: "scratch",
}
_KINDS = {words.SEGMENT: "", words.CHUNK: "chunk {index}", words.PART: "part {index}", words.TILE: "tile"}


_STAGED = (words.INPUT_IS_STAGED, words.OUTPUT_IS_STAGED, words.OTHERS_ARE_STAGED, words.IS_PULLED,
           words.IS_UNDIVIDED)  # fmt: skip
_UNSTAGED = (words.IN_USE, words.IS_PUSHED, words.MAY_DIVIDE, words.IS_DIVIDED)


def draw(
    collective: str, size: int, rank: int, *, root: int = 0, long: bool = False, single_copy: bool = False
) -> list[str]:
    """Return a rank's plan on shared memory as lines of text.

    Parameters
    ----------
    collective
        A collective in lower case, such as ``"allreduce"``.
    size, rank, root
        Number of ranks; the rank whose plan is drawn; the root of rooted collectives.
    long
        Whether the vector is longer than a slot.
    single_copy
        Whether the system copies private memory between processes, so that nothing passes through stages.
    """
    header, *rows = make(collective, size, rank, root=root, long=long)
    facts = list(_facts(PlanHeader._make(header))) if long else []
    return [f"rank {rank}", *facts, *_lines(rows, rank, _hidden(rows) if single_copy else set())]


def draw_counted(collective: str, rank: int, *, root: int = 0) -> list[str]:
    """Return a rank's plan of a Gatherv or Scatterv in one round as lines of text.

    Parameters
    ----------
    collective
        ``"gather"`` or ``"scatter"``.
    rank, root
        The rank whose plan is drawn; the root.
    """
    rows = make_counted(collective, rank, is_root=rank == root)[1:]
    meanings = _OF_PARTS[collective, rank == root]
    lines = [f"rank {rank}" + ", the root" * (rank == root)]
    for row in rows:
        name = _INSTRUCTIONS[row[words.OPERATION]]
        meaning = meanings.get(row[words.OPERATION], "") or _operands(row, rank)
        lines.append(f"  {name:<13}{meaning.format(root=root)}".rstrip())
    return lines


def _hidden(rows: list[Row]) -> set[int]:
    """Return the rows that have no effect if nothing passes through stages."""
    hidden = {number for number, row in enumerate(rows) if row[words.OPERATION] == words.SEGMENTS}
    for number, row in enumerate(rows):
        if row[words.OPERATION] == words.IF and row[words.FIRST] in _STAGED:
            hidden |= set(range(number, number + 1 + row[words.ROWS]))
        elif row[words.OPERATION] == words.IF and row[words.FIRST] in _UNSTAGED:
            hidden.add(number)  # it holds
    return hidden


def _facts(header: PlanHeader) -> Iterator[str]:
    """Yield which buffers other ranks use."""
    for who, what in ((header.read, "sendbuf"), (header.written, "recvbuf")):
        if who != words.NONE:
            yield f"  (others use the {what} of {_who(who)})"


def _who(rank: int) -> str:
    return "all ranks" if rank == words.ALL else f"rank {rank}"


def _lines(rows: list[Row], own: int, hidden: set[int]) -> Iterator[str]:
    """Yield a line a row, those under a condition or in a loop indented."""
    ends: list[int] = []
    for number, row in enumerate(rows):
        ends = [end for end in ends if number < end]
        if row[words.OPERATION] == words.AGAIN or number in hidden:
            continue
        name = _INSTRUCTIONS[row[words.OPERATION]]
        yield f"  {'  ' * len(ends)}{name:<10}{_operands(row, own)}".rstrip()
        if row[words.OPERATION] in (words.IF, words.TILES):
            ends.append(number + 1 + row[words.ROWS])


def _operands(row: Row, own: int) -> str:
    what, first = row[words.OPERATION], row[words.FIRST]
    if what in _MEANINGS:
        return _MEANINGS[what]
    if what == words.RESOLVE:
        return f"find out how {_RESOLVED[first]} is accessed"
    if what == words.ENTER:
        shown = "call and addresses" if first == 1 else "call"
        before = "the operation" if first == 1 else "an operation"
        return f"wait until all have started {before} before; write the {shown} to the own record"
    if what in (words.MEET, words.AT_WORK, words.WAIT_DONE):
        return _meeting(what, first, own)
    if what == words.IF:
        return _CONDITIONS[first].format(rank=row[words.CONDITION_RANK])
    if what == words.TILES:
        return f"of {_range(row, words.TO_INDEX) or 'the vector'}"
    return _movement(row)


def _meeting(what: int, rank: int, own: int) -> str:
    if what == words.MEET and rank == own:
        return "do not wait, unless this call has not been compared before"
    who = _who(rank)
    return {
        words.MEET: f"wait until {who} {'have' if rank == words.ALL else 'has'} started; compare the calls",
        words.AT_WORK: f"announce that buffers of {who} are used from now on",
        words.WAIT_DONE: f"wait until {who} {'are' if rank == words.ALL else 'is'} done",
    }[what]


def _movement(row: Row) -> str:
    target = _place(row, words.TO, words.TO_RANK, words.TO_INDEX)
    if row[words.OPERATION] != words.REDUCE:
        return f"{target} <- {_place(row, words.FROM, words.FROM_RANK, words.FROM_INDEX)}"
    first, last = row[words.FROM_FIRST], row[words.FROM_LAST]
    space = _SPACES[row[words.FROM]].replace(" {rank}", "s")
    ranks = " + ".join(map(str, range(first, last + 1))) if last - first < 4 else f"{first} + ... + {last}"
    return f"{target} <- {space} {ranks}"


def _place(row: Row, space: int, rank: int, index: int) -> str:
    part = _range(row, index)
    return _SPACES[row[space]].format(rank=row[rank]) + (f", {part}" if part else "")


def _range(row: Row, index: int) -> str:
    return _KINDS[row[words.KIND]].format(index=row[index])
