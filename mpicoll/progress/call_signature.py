"""Signatures of calls, which ranks compare, and states of waits, which they report to each other."""

from __future__ import annotations

import zlib
from typing import NamedTuple

ANY_CODE = 0
"""The code that is equal to every code."""


class Signature(NamedTuple):
    """The properties of a call that must be equal on all ranks.

    Attributes
    ----------
    text
        The call with its arguments, for messages.
    code
        A hash of the text, for comparison.
    base
        If ranks know only part of the call, a hash of the part that all of them know; else 0.
    """

    text: str
    code: int
    base: int = 0

    @classmethod
    def of(cls, text: str) -> Signature:
        """Return the signature with this text."""
        return cls(text, zlib.crc32(text.encode()))

    @classmethod
    def in_part(cls, call: str, detail: str, rest: str, *, known: bool) -> Signature:
        """Return the signature of a call with a detail that only some ranks know; `known` if this one does."""
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
        """The hash of the part of the call that all ranks know."""
        return self.base or self.code

    def in_common(self) -> Signature:
        """Return the signature of the part of the call that all ranks know."""
        return self._replace(code=self.common_code)

    def as_nonblocking(self) -> Signature:
        """Return the signature of the nonblocking form, which does not match the blocking one."""
        text = f"I{self.text[:1].lower()}{self.text[1:]}"
        return Signature(text, self.code and zlib.crc32(text.encode()), self.base and zlib.crc32(b"I", self.base))

    @classmethod
    def refusing(cls, call: str) -> Signature:
        """Return the signature of a rank whose arguments are wrong; it matches all, since the others get the reason."""
        return cls(f"{call}: refused", ANY_CODE)


class Waiting(NamedTuple):
    """State of a wait.

    Attributes
    ----------
    number, signature
        Number and signature of the collective.
    progress
        Its progress, for messages.
    peers
        The ranks waited for.
    only_peers
        Whether the call depends on no other ranks than these.
    only_peers_missing
        Whether all others than these are known to have made the call.
    is_nonblocking
        Whether it is a nonblocking call, which does not match a blocking one.
    is_agreement
        Whether the ranks are comparing the call, or preparing it, before any data moves.
    """

    number: int
    signature: Signature
    progress: str
    peers: tuple[int, ...]
    only_peers: bool = False
    only_peers_missing: bool = False
    is_nonblocking: bool = False
    is_agreement: bool = False

    @property
    def text(self) -> str:
        """The call with its arguments, for messages."""
        return (self.signature.as_nonblocking() if self.is_nonblocking else self.signature).text

    def missing(self, silent: list[int], *, all_report: bool) -> list[int]:
        """Return those of the `silent` ranks, which have not reported this call, that are known to be missing.

        Parameters
        ----------
        all_report
            Whether all ranks that wait report it to this one.
        """
        if all_report and not (self.only_peers or self.only_peers_missing):
            return silent
        return [rank for rank in silent if rank in self.peers]
