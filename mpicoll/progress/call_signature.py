"""Signatures of calls: what ranks compare, and what they tell each other of a wait."""

from __future__ import annotations

import zlib
from typing import NamedTuple

ANY_CODE = 0
"""Goes with every code."""


class Signature(NamedTuple):
    """A call as all ranks must make it: its text for people, and a number for comparing.

    Attributes
    ----------
    base
        Where ranks do not know all of the call: the number of what all of them know; else 0.
    """

    text: str
    code: int
    base: int = 0

    @classmethod
    def of(cls, text: str) -> Signature:
        """Make the signature with this text."""
        return cls(text, zlib.crc32(text.encode()))

    @classmethod
    def in_part(cls, call: str, detail: str, rest: str, *, known: bool) -> Signature:
        """Make that of a call with a detail that only some ranks know, this one or not."""
        base = zlib.crc32(f"{call}({rest})".encode()) or 1
        if not known:
            return cls(f"{call}({rest})", ANY_CODE, base)
        return cls.of(f"{call}({detail}, {rest})")._replace(base=base)

    @property
    def is_complete(self) -> bool:
        """True if this rank knows all of the call."""
        return self.code != ANY_CODE

    @property
    def common_code(self) -> int:
        """The number of what all ranks know of the call."""
        return self.base or self.code

    def in_common(self) -> Signature:
        """Return that of what all ranks know of the call."""
        return self._replace(code=self.common_code)

    @classmethod
    def refusing(cls, call: str) -> Signature:
        """Make that of a rank whose arguments are wrong: it differs from none, since the others will be told why."""
        return cls(f"{call}: refused", ANY_CODE)


class Waiting(NamedTuple):
    """State of a wait: the call, its progress, the ranks waited for, and whether they are all that matter."""

    number: int
    signature: Signature
    progress: str
    peers: tuple[int, ...]
    only_peers: bool = False
