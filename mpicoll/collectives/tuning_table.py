"""Tuning tables: files of the algorithms that ``python -m mpicoll tune`` has measured to be fastest.

There is one file for each MPI library, machine and number of ranks. All ranks of a communicator know the same files
(:mod:`mpicoll.collectives.machine_tables`), so that they select the same algorithms.
"""

from __future__ import annotations

import functools
import json
import math
import platform
from pathlib import Path
from typing import Any

from mpi4py import MPI

from mpicoll.collectives import compression_tuning, machine_tables
from mpicoll.collectives.compression_tuning import PayingRange
from mpicoll.collectives.machine_tables import MachineTables
from mpicoll.collectives.select import ALGORITHMS, HIERARCHY, NATIVE, SHARED, SINGLE_COPY, Rule
from mpicoll.communicator.channel import Channel
from mpicoll.compression import compressor
from mpicoll.environment import cache_folder, cores, processor, write_measurement

_FORMAT = 1
Rules = dict[str, tuple[Rule, ...]]
Spans = dict[str, PayingRange]


def facts(channel: Channel) -> dict[str, Any]:
    """Return the properties of a communicator for which a table is valid."""
    return _facts_of_process() | _facts_of(channel)


def _facts_of(channel: Channel) -> dict[str, Any]:
    """Return those that all ranks know."""
    cluster = channel.cluster
    return {
        "ranks": channel.size,
        "nodes": (channel.size if channel.apart else 1) if cluster is None else len(set(cluster.node_of)),
        "shared": channel.shared_nbytes >= 0,
    }


def _facts_of_process() -> dict[str, Any]:
    """Return those that may differ between ranks."""
    return _lasting_facts() | {"cores": cores()}


@functools.cache
def _lasting_facts() -> dict[str, Any]:
    levels = (MPI.THREAD_SINGLE, MPI.THREAD_FUNNELED, MPI.THREAD_SERIALIZED, MPI.THREAD_MULTIPLE)
    return {
        "library": MPI.Get_library_version().split(",")[0].split("\n")[0].strip("\0 "),
        "thread_level": levels.index(MPI.Query_thread()),
        "machine": platform.machine(),
        "processor": processor(),
    }


def path_for(known: dict[str, Any]) -> Path:
    """Return the file of the table for the facts `known`."""
    return cache_folder() / machine_tables.name_for(known)


def save(known: dict[str, Any], rules: Rules, spans: Spans | None = None) -> Path:
    """Write a table, and the ranges in which compressors pay; the old file is replaced atomically. Return the path."""
    path = path_for(known)
    rows = {collective: [[rule.below, rule.name] for rule in table] for collective, table in rules.items()}
    pays = {spec: [int(low), None if high == math.inf else int(high)] for spec, (low, high) in (spans or {}).items()}
    content = {"format": _FORMAT, "facts": known, "rules": rows, "compression": pays}
    write_measurement(path, json.dumps(content, indent=1))
    return path


def parse(text: str, known: dict[str, Any]) -> tuple[Rules, Spans]:
    """Return the rules of a table, and the ranges in which compressors pay.

    Raises
    ------
    ValueError
        If the table is damaged or for other facts than `known`.
    """
    try:
        content = json.loads(text)
        if content["format"] != _FORMAT or content["facts"] != known:
            raise ValueError("it is for another version, library or machine")
        rules = {}
        for collective, rows in content["rules"].items():
            rules[collective] = tuple(Rule(_boundary(below), _name(collective, name)) for below, name in rows)
        spans = {spec: _span(spec, *bounds) for spec, bounds in content.get("compression", {}).items()}
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"it is damaged ({type(error).__name__}: {error})") from None
    return rules, spans


def _span(spec: str, low: Any, high: Any) -> PayingRange:
    compressor(spec)
    if not isinstance(low, int) or not isinstance(high, (int, type(None))) or not 0 <= low <= (high or low):
        raise ValueError(f"{spec}: {low!r} and {high!r} are not a range of bytes")
    return PayingRange(low, math.inf if high is None else high)


def _boundary(below: Any) -> int:
    if not isinstance(below, int) or below < 1 or below & (below - 1):
        raise ValueError(f"{below!r} is not a power of two")
    return below


def _name(collective: str, name: Any) -> str:
    if collective not in ALGORITHMS or name not in (*ALGORITHMS[collective], NATIVE, SHARED, SINGLE_COPY, HIERARCHY):
        raise ValueError(f"there is no algorithm {name!r} of {collective!r}")
    return str(name)


def of(channel: Channel) -> Rules:
    """Return the rules for a communicator, equal on all ranks; collective if it was not made from one that has tables.

    The first call also reads the ranges in which compressors pay.
    """
    if channel.rules is None and channel.size == 1:
        channel.rules = {}  # there is nothing to choose
    if channel.rules is None:
        if channel.tables is None:
            channel.tables = machine_tables.told(channel.comm, _facts_of_process())
        channel.rules, spans = _parsed(channel, channel.tables)
        compression_tuning.remember(channel, spans)
    return channel.rules


def _parsed(channel: Channel, tables: MachineTables) -> tuple[Rules, Spans]:
    facts = _facts_of(channel)
    key = tuple(facts.values())
    if key not in tables.parsed:
        known = tables.facts | facts
        name, tables.parsed[key] = machine_tables.name_for(known), ({}, {})
        try:
            if name in tables.texts:
                tables.parsed[key] = parse(tables.texts[name], known)
        except ValueError as error:
            machine_tables.ignore(name, error)
    rules, spans = tables.parsed[key]
    return rules, spans
