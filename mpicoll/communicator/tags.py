"""Tags of messages, and the slots into which they are divided."""

from __future__ import annotations

from mpicoll.progress.call_signature import Signature


class Tags:
    """Layout of message tags: some bits are the number of a tag slot, the others a code of the call's signature.

    A message of a call that its peer does not make matches no receive there, so that a wrong program overwrites
    nothing, and two operations in flight cannot receive each other's messages.
    """

    AGREEMENT, EXCHANGE, SLOTS, LANES, LENGTHS, ALL_LENGTHS, FIRST_FREE = 1, 2, 3, 4, 5, 6, 7
    """Values in slot 0; 0 itself is the control tag."""

    def __init__(self, upper_bound: int) -> None:
        bits = min((upper_bound + 1).bit_length() - 1, 29)
        slot_bits = min(12, bits // 3 + 2)
        self.slots = 1 << slot_bits
        self._code_bits = bits - slot_bits

        self._nonblocking = 0

    @property
    def kept_slots(self) -> range:
        """The tag slots for nonblocking operations whose plans are kept."""
        return range(1, 1 + self.slots // 8)

    @property
    def persistent_slots(self) -> range:
        """The tag slots for persistent operations."""
        return range(self.slots // 2, self.slots)

    def next_slot(self) -> int:
        """Return the tag slot of the next nonblocking operation whose plan is not kept, the same on all ranks.

        Slots are reused after some hundred operations; then an operation starts when the last one in its slot has
        ended on this rank. On other ranks it may still be in flight, since messages of one tag are received in the
        order sent.
        """
        self._nonblocking += 1
        first = self.kept_slots.stop
        return first + self._nonblocking % (self.persistent_slots.start - first)

    def tag(self, slot: int, signature: Signature) -> int:
        """Return the tag of a call in a slot; slot 0 is for blocking calls."""
        codes = (1 << self._code_bits) - self.FIRST_FREE
        return (slot << self._code_bits) + self.FIRST_FREE + signature.code % codes
