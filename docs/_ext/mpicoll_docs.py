"""Directives that ask the programs themselves, so that the site cannot disagree with them.

``command-help``
    The help text of a program, from its own parser: ``python -m PROGRAM --help``.
``command-output``
    What ``python -m mpicoll ...`` prints, behind the command.
``compressor-classes``
    The docstring of every registered compressor.

Two checks run with every build: each environment variable that the code reads is on its page, and a cross-reference
into the package that leads to nothing documented must at least name something that exists.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective

import mpicoll

REPOSITORY = Path(__file__).parents[2]
ENVIRONMENT_PAGE = Path("reference") / "environment.md"
_COLUMNS = "88"
_SECONDS = 60
_SOURCES = ("mpicoll", "kernels", "bench")
_VARIABLE = re.compile(r"\bMPICOLL_[A-Z_]*[A-Z]\b")


@cache
def help_text(program: str) -> str:
    """Return what ``python -m program --help`` prints; ExtensionError if it fails."""
    command = [sys.executable, "-m", *shlex.split(program), "--help"]
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env={**os.environ, "COLUMNS": _COLUMNS, "PYTHONWARNINGS": "ignore"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    if done.returncode or not done.stdout.strip():
        raise ExtensionError(f"{shlex.join(command)}: status {done.returncode}: {done.stderr.strip()}")
    return done.stdout.strip("\n")


@cache
def output(arguments: str) -> str:
    """Return what ``python -m mpicoll arguments`` prints; ExtensionError if it fails."""
    from mpicoll.__main__ import main

    out, err = io.StringIO(), io.StringIO()
    kept = os.environ.get("MPICOLL_CACHE_DIR")
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        os.environ["MPICOLL_CACHE_DIR"] = folder  # predictions are for the textbook's machine, not for this one
        try:
            status = main(shlex.split(arguments))
        finally:
            os.environ.pop("MPICOLL_CACHE_DIR")
            if kept is not None:
                os.environ["MPICOLL_CACHE_DIR"] = kept
    if status:
        raise ExtensionError(f"python -m mpicoll {arguments}: status {status}: {err.getvalue().strip()}")
    return out.getvalue().strip("\n")


def variables_read() -> set[str]:
    """Return the names of the environment variables of our own that the code names."""
    files = (path for folder in _SOURCES for path in (REPOSITORY / folder).rglob("*.py"))
    return {name for path in files for name in _VARIABLE.findall(path.read_text(encoding="utf-8"))}


def variables_missing(page: str) -> list[str]:
    """Return which of them have no row in the table of a page."""
    return sorted(name for name in variables_read() if f"| `{name}` |" not in page)


def _literal(text: str, language: str) -> nodes.literal_block:
    block = nodes.literal_block(text, text)
    block["language"] = language
    return block


class CommandHelp(SphinxDirective):
    """The help text of a program."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """Run it."""
        return [_literal(help_text(self.arguments[0]), "text")]


class CommandOutput(SphinxDirective):
    """A command and what it prints."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """Run it."""
        arguments = " ".join(self.arguments[0].split())
        return [_literal(f"$ python -m mpicoll {arguments}\n{output(arguments)}", "text")]


class CompressorClasses(SphinxDirective):
    """Every class of the compressors' registry with its names; inside of ``eval-rst``."""

    def run(self) -> list[nodes.Node]:
        """Run it."""
        from mpicoll.compression.compressor_specs import _FACTORIES

        named: dict[type, list[str]] = {}
        for name, (kind, _) in _FACTORIES.items():
            named.setdefault(kind, []).append(name)
        lines = StringList()
        for kind, names in named.items():
            entry = f".. autoclass:: {kind.__module__}.{kind.__qualname__}"
            text = ["**" + ", ".join(names) + "**", "", entry, "   :no-members:", ""]
            lines.extend(StringList(text, source=f"{kind.__module__}"))
        return self._parsed(lines)

    def _parsed(self, lines: StringList) -> list[nodes.Node]:
        """Parse reST lines where the directive stands."""
        parent = nodes.Element()
        self.state.nested_parse(lines, self.content_offset, parent)
        return list(parent.children)


def _check_environment(app: Sphinx) -> None:
    missing = variables_missing((Path(app.srcdir) / ENVIRONMENT_PAGE).read_text(encoding="utf-8"))
    if missing:
        raise ExtensionError(f"{ENVIRONMENT_PAGE}: no row for {', '.join(missing)}, which the code reads")


def _found(target: str) -> Any:
    """Return what ``package.module.attribute`` names; LookupError if it names nothing.

    An attribute that only instances have is found where the docstring of its class names it.
    """
    parts = target.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for attribute in parts[length:]:
            if isinstance(found, type) and not hasattr(found, attribute):
                if re.search(rf"^ +(\w+, )*{attribute}\b", found.__doc__ or "", re.MULTILINE):
                    return found
                raise LookupError(target)
            try:
                found = getattr(found, attribute)
            except AttributeError:
                raise LookupError(target) from None
        return found
    raise LookupError(target)


def _lookup(target: str, module: str, kind: str) -> Any:
    """Return what a reference names that stands in a docstring of a module, or of a class that may be from another."""
    prefixes = ["", f"{module}.", f"{module}.{kind}."] if module else [""]
    if kind:
        with contextlib.suppress(LookupError):
            prefixes.append(f"{_found(f'{module}.{kind}').__module__}.")
    for prefix in prefixes:
        with contextlib.suppress(LookupError):
            return _found(prefix + target)
    raise LookupError(target)


def _resolve(app: Sphinx, env: Any, node: Any, contnode: nodes.TextElement) -> nodes.Node | None:
    """Link what is documented under its public name; leave as text what exists but is no part of the reference.

    A reference to something that does not exist stays unresolved, and is a warning.
    """
    if node.get("refdomain") != "py":
        return None
    target, module, kind = (str(node.get(name) or "") for name in ("reftarget", "py:module", "py:class"))
    try:
        found = _lookup(target, module, kind)
    except LookupError:
        return None
    public = next((name for name in mpicoll.__all__ if getattr(mpicoll, name) is found), None)
    if public is not None and isinstance(found, type):
        return env.domains["py"].resolve_xref(
            env, node["refdoc"], app.builder, "obj", f"mpicoll.{public}", node, contnode
        )
    return contnode


def _escape_bars(lines: list[str]) -> None:
    """Escape the bars of |x| outside of literal text: our docstrings mean absolute values, never substitutions."""
    block_depth: int | None = None
    in_quotes = False
    for number, line in enumerate(lines):
        depth = len(line) - len(line.lstrip())
        if not line.strip():
            in_quotes = False
            continue
        if block_depth is not None and depth <= block_depth:
            block_depth = None
        if block_depth is not None:
            continue
        parts = line.split("``")
        plain = slice(1 if in_quotes else 0, None, 2)
        parts[plain] = [part.replace("|", "\\|") for part in parts[plain]]
        lines[number] = "``".join(parts)
        in_quotes ^= len(parts) % 2 == 0
        if line.rstrip().endswith("::"):
            block_depth = depth


def _before_napoleon(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    _escape_bars(lines)
    app.env.temp_data["mpicoll_docs"] = list(lines)


def _after_napoleon(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Undo what napoleon makes of a property whose first sentence has a colon: it takes the words before for a type."""
    if what in ("attribute", "data", "property") and any(line.startswith(":type: ") for line in lines):
        lines[:] = app.env.temp_data["mpicoll_docs"]


def _signature(app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str, returns: str) -> Any:
    """Show the arguments of ``__init__`` where a class has a ``__new__`` too, as subclasses of mpi4py's have to."""
    if what != "class" or not {"__new__", "__init__"} <= set(vars(obj)):
        return None
    found = inspect.signature(obj.__init__)
    parameters = [each.replace(annotation=each.empty) for each in list(found.parameters.values())[1:]]
    return str(found.replace(parameters=parameters, return_annotation=found.empty)), returns


def _prefetch(app: Sphinx) -> None:
    """Ask two programs at a time for their help, since each takes a second to start."""
    pages = (path.read_text(encoding="utf-8") for path in Path(app.srcdir).rglob("*.md"))
    programs = [name.strip() for page in pages for name in re.findall(r"\{command-help\} (.*)", page)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(help_text, programs))


def setup(app: Sphinx) -> dict[str, Any]:
    """Enter directives and checks."""
    app.add_directive("command-help", CommandHelp)
    app.add_directive("command-output", CommandOutput)
    app.add_directive("compressor-classes", CompressorClasses)
    app.connect("builder-inited", _check_environment)
    app.connect("builder-inited", _prefetch)
    app.connect("autodoc-process-docstring", _before_napoleon, priority=400)
    app.connect("autodoc-process-docstring", _after_napoleon, priority=600)
    app.connect("autodoc-process-signature", _signature)
    app.connect("missing-reference", _resolve)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
