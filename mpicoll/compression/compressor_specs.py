"""Compressors by name: ``"int8"``, ``"int4:block=128"``, ``"topk:0.01"``."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

from mpicoll.compression.base import Compressor
from mpicoll.errors import UnknownCompressor

Factory = Callable[..., Compressor]
_FACTORIES: dict[str, tuple[type[Compressor], dict[str, Any]]] = {}
MODULES = (
    "bounded",
    "casts",
    "fp8",
    "integers",
    "natural",
    "powersgd",
    "qsgd",
    "sparsifiers",
    "randomized",
    "shared_scale",
    "signs",
    "ternary",
)
"""The modules of this package that define compressors, in the order of :func:`names`."""
_READERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "int": (int, "a whole number"),
    "float": (float, "a number"),
    "str": (str, "a word"),
}
"""Parsers of settings, and what they take, by the annotation of their field.

Fields of other types cannot be set by a specification.
"""


def enter(name: str, **fixed: Any) -> Callable[[type[Compressor]], type[Compressor]]:
    """Return the decorator of :func:`register`, for the modules of this package."""

    def entered(kind: type[Compressor]) -> type[Compressor]:
        if name in _FACTORIES:
            raise ValueError(f"name: {name!r} is taken by {_FACTORIES[name][0].__name__}")
        _FACTORIES[name] = (kind, fixed)
        return kind

    return entered


def register(name: str, **fixed: Any) -> Callable[[type[Compressor]], type[Compressor]]:
    """Return a class decorator that registers a compressor under `name`; a class may have several names.

    Parameters
    ----------
    name
        The name in specifications.
    fixed
        Fields of the frozen dataclass and the values that they have under this name.

    Raises
    ------
    ValueError
        If the name is taken.
    """
    _load()
    return enter(name, **fixed)


@functools.cache
def _load() -> None:
    """Import the package's own compressors: programs that do not compress start without them."""
    for module in MODULES:
        import_module(f"mpicoll.compression.{module}")


def names() -> tuple[str, ...]:
    """Return the names of all compressors: the package's own, and then others in the order of registration."""
    _load()
    places = {f"mpicoll.compression.{module}": place for place, module in enumerate(MODULES)}
    return tuple(sorted(_FACTORIES, key=lambda name: places.get(_FACTORIES[name][0].__module__, len(places))))


def compressor(spec: str | Compressor) -> Compressor:
    """Return the compressor of a specification; a :class:`~mpicoll.compression.Compressor` is returned as it is.

    Parameters
    ----------
    spec
        ``"name"``, ``"name:value"`` for the first setting, or ``"name:setting=value:setting=value"``.

    Raises
    ------
    UnknownCompressor
        If there is no compressor of that name; the message lists the names.
    ValueError
        If a setting does not exist or its value is out of range; the message names it.
    TypeError
        If `spec` is neither a string nor a compressor.

    Examples
    --------
    >>> mpicoll.compressor("topk:0.001")
    TopK(density=0.001, k=0)
    """
    if isinstance(spec, Compressor):
        return spec
    if not isinstance(spec, str):
        raise TypeError(f"compression: {spec!r} is neither a name nor a Compressor")
    _load()
    name, *settings = spec.strip().split(":")
    if name == "auto":
        alone = f": {':'.join(settings)!r}" if settings else ""
        raise UnknownCompressor(
            f"compression: {spec!r} chooses between a compressor and dense vectors, which Allreduce and Iallreduce "
            f"alone do; name the compressor{alone}"
        )
    if name not in _FACTORIES:
        raise UnknownCompressor(f"compression: {name!r} is not one of {', '.join(names())}")
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
            raise ValueError(f"compression: {spec!r}: {setting!r} is not a setting of {name}; its settings: {there}")
        values[key] = _read(spec, key, text, fields[key].type)
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"compression: {spec!r}: {error}") from None


def _read(spec: str, key: str, text: str, kind: Any) -> Any:
    reader, wanted = _READERS[str(kind)]
    try:
        return reader(text)
    except ValueError:
        raise ValueError(f"compression: {spec!r}: {key}: {text!r} is not {wanted}") from None
