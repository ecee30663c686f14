"""Comparison of the blocks of Alltoallw and Alltoallv on a node, before any data moves."""

from __future__ import annotations

import numpy as np

from mpicoll.buffers.typed_blocks import TypedBlocks
from mpicoll.collectives.call_context import CallContext
from mpicoll.messages.call_agreement import PairLengths, compare
from mpicoll.progress.call_signature import Signature


def compare_blocks(
    scope: CallContext, title: str, send: TypedBlocks, recv: TypedBlocks, dtype: np.dtype | None
) -> None:
    """Compare the calls of all ranks and the lengths of their blocks, if ``MPICOLL_CHECK`` is ``full``; collective.

    Parameters
    ----------
    dtype
        Type of all elements; None in Alltoallw, whose blocks have types of their own.

    Raises
    ------
    MismatchError, CollectiveTimeout
        On every rank; after a MismatchError the communicator stays usable.
    """
    channel = scope.channel
    if channel.check != "full":
        return
    lengths = PairLengths(send.description.nbytes, recv.description.nbytes)
    signature = Signature.of(f"{title}(algorithm=shared)")
    if dtype is not None:
        known = any(lengths.sent) or any(lengths.expected)
        signature = Signature.in_part(title, f"dtype={dtype}", "algorithm=shared", known=known)
    compare(channel, signature, lengths, channel.enter(signature), scope.timeout)
