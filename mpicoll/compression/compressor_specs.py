"""Compressors by name: ``"int8"``, ``"int4:block=128"``, ``"topk:0.01"``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from mpicoll.compression.base import Compressor
from mpicoll.errors import UnknownCompressor

Factory = Callable[..., Compressor]
_FACTORIES: dict[str, tuple[type[Compressor], dict[str, Any]]] = {}
_READERS: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str}
"""How to read a setting, by the annotation of its field, which is text; fields of other types are not for text."""


def register(name: str, **fixed: Any) -> Callable[[type[Compressor]], type[Compressor]]:
    """Enter a frozen dataclass under `name`, with some of its fields fixed; may be used several times on one class."""

    def enter(kind: type[Compressor]) -> type[Compressor]:
        if name in _FACTORIES:
            raise ValueError(f"name: {name!r} is taken by {_FACTORIES[name][0].__name__}")
        _FACTORIES[name] = (kind, fixed)
        return kind

    return enter


def names() -> tuple[str, ...]:
    """Return all names, in the order in which they were registered."""
    return tuple(_FACTORIES)


def compressor(spec: str | Compressor) -> Compressor:
    """Return the compressor that a specification describes; one that is made already is returned as it is.

    Parameters
    ----------
    spec
        ``name``, ``name:value`` for its first setting, ``name:setting=value:setting=value``.

    Raises
    ------
    UnknownCompressor
        If there is none of that name; the message lists what there is.
    ValueError
        If a setting does not exist or its value is out of range; the message names it.
    """
    if isinstance(spec, Compressor):
        return spec
    if not isinstance(spec, str):
        raise TypeError(f"compression: {spec!r} is neither a name nor a Compressor")
    name, *settings = spec.strip().split(":")
    if name == "auto":
        raise UnknownCompressor(f"compression: {spec!r} is no compressor, but leaves the choice to an allreduce")
    if name not in _FACTORIES:
        raise UnknownCompressor(f"compression: {name!r} is not one of {', '.join(_FACTORIES)}")
    kind, fixed = _FACTORIES[name]
    settable = [field for field in dataclasses.fields(kind) if str(field.type) in _READERS]  # type: ignore[arg-type]
    fields = {field.name: field for field in settable if field.name not in fixed}
    values: dict[str, Any] = dict(fixed)
    for place, setting in enumerate(settings):
        key, equals, text = setting.partition("=")
        if not equals:
            key, text = (next(iter(fields), ""), setting) if place == 0 else ("", setting)
        if key not in fields or key in values:
            there = ", ".join(fields) or "none"
            raise ValueError(f"compression: {spec!r}: {setting!r} is not a setting of {name}; there are {there}")
        values[key] = _read(spec, key, text, fields[key].type)
    return kind(**values)


def _read(spec: str, key: str, text: str, kind: Any) -> Any:
    try:
        return _READERS[str(kind)](text)
    except ValueError:
        raise ValueError(f"compression: {spec!r}: {key}: {text!r} is not {kind}") from None
