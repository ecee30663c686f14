"""Manifest of a checkpoint: ``manifest.json``, in canonical JSON, with a SHA-256 of its contents."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mpicoll.checkpoint.durable_files import file_name
from mpicoll.checkpoint.tensor_file import dtype_of, is_count, is_shape
from mpicoll.checkpoint.write_assignment import TensorLayout, check_tiling, is_name, piece_key
from mpicoll.quantities import counted

NAME = "manifest.json"
MAX_BYTES = 1 << 26
_FORMAT = "mpicoll-checkpoint"
_VERSION = 1
_HASH = re.compile(r"[0-9a-f]{64}")
_MAX_RANKS = 1 << 20
_FIELDS = {"format", "version", "sha256", "size", "step", "files", "tensors", "facts"}


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint.

    Attributes
    ----------
    step, size
        Step after which it was written, and number of ranks that wrote it.
    files
        Length in bytes and SHA-256 of the file of each rank, in rank order.
    tensors
        By name ``{"kind": "vector", "dtype", "shape", "pieces": [[start, stop, rank], ...]}``, the pieces in order, or
        ``{"kind": "per_rank", "dtype", "shapes": [[rank, shape], ...]}``.
    facts
        Facts that the run saved.
    """

    step: int
    size: int
    files: tuple[tuple[int, str], ...]
    tensors: Mapping[str, dict[str, Any]]
    facts: dict[str, Any]

    def contents_of(self, rank: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return dtype and shape of every tensor in a rank's file, by key."""
        found: dict[str, tuple[str, tuple[int, ...]]] = {}
        for name, tensor in self.tensors.items():
            if tensor["kind"] == "vector":
                for start, stop, owner in tensor["pieces"]:
                    if owner == rank:
                        found[piece_key(name, start)] = tensor["dtype"], (stop - start,)
            else:
                for owner, shape in tensor["shapes"]:
                    if owner == rank:
                        found[name] = tensor["dtype"], tuple(shape)
        return found

    def layout(self, name: str) -> TensorLayout:
        """Return kind, dtype and shape of a tensor; the shape is () for one that each rank has of its own."""
        tensor = self.tensors[name]
        return TensorLayout(tensor["kind"], tensor["dtype"], tuple(tensor.get("shape", ())), [])


def plain(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return facts after a round trip through JSON.

    Raises
    ------
    ValueError, TypeError
        If they contain anything but dicts, lists, strings, finite numbers, bools and None.
    """
    found: dict[str, Any] = json.loads(json.dumps(dict(facts), allow_nan=False))
    return found


def encode(manifest: Manifest) -> bytes:
    """Return the bytes of the file."""
    files = {file_name(rank): {"nbytes": n, "sha256": digest} for rank, (n, digest) in enumerate(manifest.files)}
    body = {"format": _FORMAT, "version": _VERSION, "size": manifest.size, "step": manifest.step,
            "files": files, "tensors": dict(manifest.tensors), "facts": manifest.facts}  # fmt: skip
    return _canonical(body | {"sha256": _hash(body)})


def decode(data: bytes, step: int) -> Manifest:
    """Return the manifest of `step` in untrusted bytes.

    Raises
    ------
    ValueError
        With the reason, if :func:`encode` has not written these bytes for this step.
    """
    try:
        said = json.loads(data)
    except (ValueError, RecursionError):
        raise ValueError("is not JSON") from None
    if not isinstance(said, dict) or said.get("format") != _FORMAT:
        raise ValueError(f"does not say that it is of format {_FORMAT}")
    version = said.get("version")
    if type(version) is not int or version != _VERSION:
        newer = type(version) is int and version > _VERSION
        what = "of a newer version of mpicoll" if newer else "unknown"
        raise ValueError(f"has format version {version!r:.20}, which is {what}; this one reads {_VERSION}")
    if set(said) != _FIELDS or not _is_canonical(said, data):
        raise ValueError("is damaged: it is not in the form in which it was written")
    if said.pop("sha256") != _hash(said):
        raise ValueError("is damaged: its SHA-256 does not match")
    return _checked(said, step)


def _canonical(value: Any) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n"


def _hash(body: dict[str, Any]) -> str:
    return hashlib.sha256(_canonical(body)).hexdigest()


def _is_canonical(said: Any, data: bytes) -> bool:
    """Return True if `data` is our encoding of `said`: no duplicate names, no other spelling of a number."""
    try:
        return _canonical(said) == data
    except (ValueError, TypeError, RecursionError):
        return False


def _checked(said: dict[str, Any], step: int) -> Manifest:
    size, files, tensors = said["size"], said["files"], said["tensors"]
    if said["step"] != step or type(said["step"]) is not int:
        raise ValueError(f"is of step {said['step']!r:.40}, not of step {step}")
    if type(size) is not int or not 1 <= size <= _MAX_RANKS:
        raise ValueError(f"has size {size!r:.40}, which is not a number of ranks")
    if not isinstance(said["facts"], dict):
        raise ValueError(f"has facts {said['facts']!r:.40}, which are not an object")
    if not isinstance(files, dict) or list(files) != sorted(file_name(rank) for rank in range(size)):
        raise ValueError(f"does not name the files of {counted(size, 'rank')}, and no others")
    if not isinstance(tensors, dict):
        raise ValueError("has no table of tensors")
    for name, tensor in tensors.items():
        _check_tensor(name, tensor, size)
    pairs = tuple(_file(name, files[name]) for name in map(file_name, range(size)))
    return Manifest(step, size, pairs, tensors, said["facts"])


def _file(name: str, said: Any) -> tuple[int, str]:
    good = isinstance(said, dict) and set(said) == {"nbytes", "sha256"} and is_count(said["nbytes"])
    if not good or not isinstance(said["sha256"], str) or not _HASH.fullmatch(said["sha256"]):
        raise ValueError(f"has no length and SHA-256 for {name}")
    return said["nbytes"], said["sha256"]


def _check_tensor(name: str, said: Any, size: int) -> None:
    try:
        dtype_of(said["dtype"])
        kind = said["kind"]
        good = is_name(name) and kind in ("vector", "per_rank")
        good = good and set(said) == {"kind", "dtype", *(("shape", "pieces") if kind == "vector" else ("shapes",))}
    except (TypeError, KeyError):
        good = False
    if not good:
        raise ValueError(f"describes no tensor under the name {name!r:.80}")
    if kind == "vector":
        _check_vector(name, said["shape"], said["pieces"], size)
    elif not _are_shapes(said["shapes"], size):
        raise ValueError(f"tensor {name}: ranks or shapes are out of range, or not in order")


def _check_vector(name: str, shape: Any, pieces: Any, size: int) -> None:
    good = is_shape(shape) and isinstance(pieces, list)
    if not good or not all(_are_counts(piece, 3) and piece[2] < size for piece in pieces):
        raise ValueError(f"tensor {name}: shape or pieces are out of range")
    check_tiling(name, pieces, math.prod(shape))


def _are_counts(value: Any, length: int) -> bool:
    return isinstance(value, list) and len(value) == length and all(is_count(item) for item in value)


def _are_shapes(shapes: Any, size: int) -> bool:
    if not isinstance(shapes, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in shapes):
        return False
    if not all(is_count(rank) and rank < size and is_shape(shape) for rank, shape in shapes):
        return False
    return all(one[0] < other[0] for one, other in itertools.pairwise(shapes))
