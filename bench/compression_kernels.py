"""Encoding and decoding of every registered compressor, for :mod:`bench.kernels`.

Bytes touched are those read and written: of int8 4n + n to encode, n + 4n to decode, n + 8n to decode and add, for n
elements. A compressor that needs error feedback (``+EF``) is timed with it: the vector is added to the residual, that
is encoded, and what arrives is taken away again, 32n bytes besides the payload written and read; where few elements are
sent, only those are taken away, 16n. ``of_copy`` is their number a second over that of `numpy.copyto`, which touches
8n; ``of_read``, for those that send a few elements, is the time of reading the vector once over that of encoding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from bench.result_files import COPY, FEEDBACK, NUMPY, Case
from mpicoll.compression import Compressor, ErrorFeedback, Key, Sparsifier, compressor, names
from mpicoll.kernels.bits import float32_bits
from mpicoll.kernels.codecs import sparse_encoding, sparse_vectors
from mpicoll.kernels.decorators import kernel

OURS, READ = "ours", "read"
STEPS = ("encode", "decode", "decode_add")
_BLOCK = 512
_KEY = Key(1, 2, 3)


def specifications() -> tuple[str, ...]:
    """Return all that are registered, those with stochastic rounding too."""
    return tuple(name for given in names() for name in _variants(given))


def _variants(name: str) -> Iterator[str]:
    yield "topk:0.01" if name == "topk" else name
    if name in ("int8", "int4"):
        yield f"{name}:rounding=stochastic"


@kernel
def _read(x: np.ndarray) -> np.uint32:
    largest = np.uint32(0)
    for i in range(x.size):
        largest = np.uint32(max(largest, float32_bits(x[i])))
    return largest


class Codec:
    """One compressor, step and length; a `bench.harness.Contest`."""

    def __init__(self, specification: str, step: str, nbytes: int) -> None:
        codec, count = compressor(specification), max(1, nbytes // 4)
        x = np.random.default_rng(1).standard_normal(count).astype(np.float32)
        payload = np.zeros(codec.wire_nbytes(count), np.uint8)
        payload = payload[: codec.compress(x, payload, _KEY)]
        self._codec, self._step, self._x, self._payload = codec, step, x, payload
        self._again, self._out = np.zeros(codec.wire_nbytes(count), np.uint8), np.zeros(count, np.float32)
        self._feedback = ErrorFeedback(codec) if step == "encode" and codec.needs_feedback else None
        name = specification + FEEDBACK * (self._feedback is not None)
        self.case = Case(f"kernel {step}", x.nbytes, count, "float32", 1, name)
        ours: dict[str, Callable[[], Any]] = {
            "encode": partial(codec.compress, x, self._again, _KEY)
            if self._feedback is None
            else self._with_feedback(),
            "decode": partial(codec.decompress, payload, self._out),
            "decode_add": partial(codec.decompress_add, payload, self._out),
        }
        self.calls: dict[str, Callable[[], Any]] = {OURS: ours[step], COPY: partial(np.copyto, np.empty_like(x), x)}
        plain = numpy_way(specification, step, x, self._out)
        if plain is not None:
            self.calls[NUMPY] = plain
        if specification.startswith("topk"):
            self.calls[READ] = partial(_read, x)

    def _with_feedback(self) -> Callable[[], int]:
        """Return what encodes the vector with the residual, and keeps what does not arrive, as an allreduce does."""
        codec, feedback, x, again, out = self._codec, self._feedback, self._x, self._again, self._out
        assert feedback is not None
        if not isinstance(codec, Sparsifier):

            def dense() -> int:
                nbytes = codec.compress(feedback.compensate(x), again, _KEY)
                codec.decompress(again[:nbytes], out)
                feedback.update(out)
                return nbytes

            return dense
        most = codec.capacity(x.size)
        indices, values = np.empty(most, np.uint32), np.empty(most, np.float32)

        def few() -> int:
            total = feedback.compensate(x)
            number = codec.select(total, _KEY, indices, values)
            sparse_vectors.take_out(total, indices[:number])
            return int(sparse_encoding.encode(indices[:number], values[:number], 0, total.size, again))

        return few

    def wrong(self, contender: str) -> int:
        """Call it once more, and count what is not as `decompress` of the first payload says."""
        if contender != OURS:
            return 0
        expected = np.empty_like(self._x)
        self._codec.decompress(self._payload, expected)
        if self._step == "encode":
            self._again[:] = 0xA5
            if self._feedback is not None:
                self._feedback.reset()
            nbytes = self.calls[OURS]()
            different = int(np.count_nonzero(self._again[:nbytes] != self._payload)) + self._far_off(expected)
            if self._feedback is None:
                return different
            return different + int(np.count_nonzero(self._feedback.residual != self._x - expected))
        if self._step == "decode_add":
            self._out.fill(1)
            expected += np.float32(1)
        self.calls[OURS]()
        return int(np.count_nonzero(self._out.view(np.uint32) != expected.view(np.uint32)))

    def _far_off(self, decoded: np.ndarray) -> int:
        """Return 1 if what arrives has little to do with what was sent."""
        return int(not float(decoded @ self._x) > 0)

    def detail(self, contender: str, medians: Mapping[str, float]) -> Mapping[str, Any]:
        """Return the share of the copy's bandwidth, and of a reading pass's time where that is what limits."""
        streams, payloads = {"encode": 1, "decode": 1, "decode_add": 2}[self._step], 1
        if self._feedback is not None:
            streams, payloads = (4, 1) if isinstance(self._codec, Sparsifier) else (8, 2)
        touched = streams * self._x.nbytes + payloads * self._payload.size
        share = {"of_copy": round(touched / (2 * self._x.nbytes) * medians[COPY] / medians[contender], 3)}
        if contender in (COPY, READ):
            return {}
        if self._step == "encode" and READ in medians:
            share["of_read"] = round(medians[READ] / medians[contender], 3)
        return share

    def close(self) -> None:
        """Nothing is held."""


def numpy_way(specification: str, step: str, x: np.ndarray, out: np.ndarray) -> Callable[[], Any] | None:
    """Return how NumPy would do about the same without a loop, None for what it has no calls for."""
    halves = {"fp16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
    if specification in halves:
        short = x.astype(halves[specification])
        steps: dict[str, Callable[[], Any]] = {
            "encode": partial(x.astype, short.dtype),
            "decode": partial(np.copyto, out, short, casting="unsafe"),
            "decode_add": partial(_add, out, short),
        }
        return steps[step]
    whole = x[: x.size // _BLOCK * _BLOCK].reshape(-1, _BLOCK)
    if step != "encode" or not whole.size:
        return None
    ways: Mapping[str, Callable[[], Any]] = {
        "int8": partial(_round, whole, 127),
        "int4": partial(_round_and_pack, whole),
        "sign": partial(_signs, whole, np.zeros_like(whole)),
    }
    return ways.get(specification)


def _add(out: np.ndarray, short: np.ndarray) -> None:
    out += short.astype(np.float32)


def _round(blocks: np.ndarray, levels: int) -> np.ndarray:
    scales = np.abs(blocks).max(1, keepdims=True) / levels
    return np.clip(np.rint(blocks / scales), -levels, levels).astype(np.int8)


def _round_and_pack(blocks: np.ndarray) -> np.ndarray:
    codes = (_round(blocks, 7) + np.int8(8)).astype(np.uint8)
    return codes[:, ::2] | codes[:, 1::2] << np.uint8(4)


def _signs(blocks: np.ndarray, total: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    total += blocks
    scales = np.abs(total).mean(1)
    packed = np.packbits(np.signbit(total), axis=1)
    total -= np.copysign(scales[:, None], total)
    return packed, scales


def contests(chosen: Sequence[str], sizes: Sequence[int]) -> Iterator[Callable[[], Codec]]:
    """Yield all steps of these compressors at these lengths in bytes."""
    for specification in chosen:
        codec: Compressor = compressor(specification)
        if codec.fixed or specification.startswith("topk"):
            yield from (partial(Codec, specification, step, nbytes) for step in STEPS for nbytes in sizes)
