"""The executor's modules with simulated memory in the place of `atomics`: what Numba compiles, run as Python."""

from __future__ import annotations

import functools
import importlib.util
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpicoll import kernels
from mpicoll.plans.simulated_memory import Memory

Edits = dict[str, tuple[str, str]] | None
"""By module, a text of its source and its replacement: errors that the proof has to find."""
_MODULES = (
    "operation_words",
    "futex",
    "instructions",
    "operands",
    "movement",
    "call_records",
    "part_offers",
    "gathered_parts",
    "scattered_parts",
    "counted_parts",
    "method_trials",
    "executor",
    "withdrawal",
)
_ATOMICS = (
    "load", "store", "load_acquire", "store_release", "fence", "copy", "read_process", "write_process", "read_vectors",
    "clock_gettime",
)  # fmt: skip
"""Methods of the memory that stand for primitives."""


def load_executor(memory: Memory, edits: Edits = None) -> types.SimpleNamespace:
    """Return the executor's modules, with `memory` in the place of `atomics`."""
    modules = load_modules(memory, _MODULES, edits)
    _note_waits(memory, modules)
    return modules


def load_modules(memory: Memory, names: Sequence[str], edits: Edits = None) -> types.SimpleNamespace:
    """Return modules of kernels, each after those that it imports, with `memory` in the place of `atomics`."""
    package = f"simulated_{id(memory)}"
    atomics = types.ModuleType(f"{package}.atomics")
    for name in _ATOMICS:
        setattr(atomics, name, getattr(memory, name))
    atomics.call_reducer = memory.reduce  # type: ignore[attr-defined]
    atomics.pause = atomics.yield_core = lambda: None  # type: ignore[attr-defined]
    atomics.fetch_add = atomics.system_call = None  # type: ignore[attr-defined]  # nobody sleeps
    decorators = types.ModuleType(f"{package}.decorators")
    decorators.DISABLED = True  # type: ignore[attr-defined]
    for name in ("helper", "inline_helper"):
        setattr(decorators, name, lambda function: function)
    for name in ("kernel_for", "linked", "native", "short_kernel"):
        setattr(decorators, name, lambda *signature: lambda function: function)
    messages = types.ModuleType(f"{package}.messages")
    messages.execute_bound = None  # type: ignore[attr-defined]
    top = types.ModuleType(package)
    top.__path__ = []
    made: dict[str, Any] = {
        package: top,
        f"{package}.atomics": atomics,
        f"{package}.decorators": decorators,
        messages.__name__: messages,
    }
    atomics.call_row = lambda function, job, what: (  # type: ignore[attr-defined]
        made[f"{package}.counted_parts"].exchange_parts(job, what)
    )
    sys.modules.update(made)
    try:
        for name in names:
            module = _load(package, name, (edits or {}).get(name, ("", "")))
            made[module.__name__] = module
    finally:
        for name in made:
            sys.modules.pop(name, None)
    return types.SimpleNamespace(**{name: made[f"{package}.{name}"] for name in names})


def _load(package: str, name: str, edit: tuple[str, str]) -> types.ModuleType:
    path, (old, new) = Path(kernels.__file__).with_name(f"{name}.py"), edit
    spec = importlib.util.spec_from_file_location(f"{package}.{name}", path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    exec(_compiled(path, old, new), module.__dict__)
    return module


@functools.cache
def _compiled(path: Path, old: str, new: str) -> types.CodeType:
    """Return a module's code, with `new` in the place of `old`."""
    source = path.read_text()
    if old not in source:
        raise ValueError(f"edits: {old!r} is not in {path.name}")
    return compile(source.replace(old, new) if old else source, str(path), "exec")


def _note_waits(memory: Memory, modules: types.SimpleNamespace) -> None:
    """Make the functions that wait for a word report the value to the memory."""
    has_come, record_of = modules.call_records.has_come, modules.operation_words.record_of
    users = modules.gathered_parts, modules.scattered_parts
    has_reached = modules.call_records.has_reached

    def noted(job: int, rank: int, sequence: int, stage: int) -> bool:
        came: bool = has_come(job, rank, sequence, stage)
        if came:
            memory.waited(record_of(job, rank, sequence), 4 * sequence + stage)
        return came

    def noted_word(job: int, word: int, wanted: int) -> bool:
        reached: bool = has_reached(job, word, wanted)
        if reached:
            memory.waited(word, wanted)
        return reached

    modules.call_records.has_come = noted
    for module in users:
        module.has_reached = noted_word
