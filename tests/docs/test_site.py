"""The documentation site builds without a warning, its links lead somewhere, and it needs no network."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
import textwrap
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import pytest

from mpicoll.__main__ import _MODULES
from tests.test_layers import REPOSITORY

for package in ("sphinx", "myst_parser", "furo", "sphinx_copybutton"):
    pytest.importorskip(package, reason=f"{package} is not installed")

DOCS = REPOSITORY / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if path.name != "README.md")
FENCE = re.compile(r"^( *)(`{3,})python[^\n]*\n(.*?)^\1\2 *$", re.MULTILINE | re.DOTALL)
SECONDS = 600
"""A build takes a quarter of a minute of one core; this is for machines that do something else as well."""


class Page(HTMLParser):
    """What a page defines and refers to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.assets: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.anchors |= {found[name] for name in ("id", "name") if name in found and tag != "meta"}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        elif tag == "link" and found.get("rel") in ("stylesheet", "icon", "preload", "modulepreload", "prefetch"):
            self.assets.append(found["href"])
        elif "src" in found:
            self.assets.append(found["src"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Page]:
    folder = tmp_path_factory.mktemp("site")
    html, trees = folder / "html", folder / "trees"
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-q", "-b", "html", "-d", str(trees)]
    done = subprocess.run(
        [*command, str(DOCS), str(html)],
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {path: Page(path) for path in sorted(html.rglob("*.html"))}


@pytest.fixture(scope="module")
def extension() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mpicoll_docs", DOCS / "_ext" / "mpicoll_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_is_built(site: dict[Path, Page]) -> None:
    built = {path.name for path in site}
    assert {path.with_suffix(".html").name for path in PAGES} <= built


def test_every_link_leads_somewhere(site: dict[Path, Page]) -> None:
    broken = []
    for path, page in site.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            anchor = unquote(parts.fragment)
            if not target.exists() or (anchor and target.suffix == ".html" and anchor not in site[target].anchors):
                broken.append(f"{path.name}: {link}")
    assert not broken


def test_no_asset_comes_from_elsewhere(site: dict[Path, Page]) -> None:
    for path, page in site.items():
        assert page.assets
        for asset in page.assets:
            parts = urlsplit(asset)
            assert not parts.netloc, f"{path.name}: {asset}"
            assert parts.scheme in ("", "data"), f"{path.name}: {asset}"
            if not parts.scheme:
                assert (path.parent / unquote(parts.path)).exists(), f"{path.name}: {asset}"


def test_no_style_sheet_loads_anything_from_elsewhere(site: dict[Path, Page]) -> None:
    folder = next(path for path in site if path.name == "index.html").parent
    sheets = list(folder.rglob("*.css"))
    assert sheets
    for sheet in sheets:
        assert not re.search(r"(@import|url\()\s*[\"']?(https?:)?//", sheet.read_text(encoding="utf-8")), sheet.name


def _blocks(page: Path) -> list[str]:
    return [textwrap.dedent(found[3]) for found in FENCE.finditer(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(DOCS)))
def test_python_on_the_page_compiles(page: Path) -> None:
    for block in _blocks(page):
        ast.parse(block)


def test_there_is_python_to_compile() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert sum(len(_blocks(page)) for page in PAGES) == text.count("```python") > 10


def test_every_environment_variable_is_on_its_page(extension: ModuleType) -> None:
    page = (DOCS / "reference" / "environment.md").read_text(encoding="utf-8")
    assert len(extension.variables_read()) > 8
    assert extension.variables_missing(page) == []
    assert extension.variables_missing(page.replace("| `MPICOLL_CHECK` |", "| |")) == ["MPICOLL_CHECK"]


def test_every_command_is_on_its_page() -> None:
    page = (DOCS / "reference" / "commands.md").read_text(encoding="utf-8")
    programs = set(re.findall(r"^```\{command-help\} (.*)$", page, re.MULTILINE))
    modules = (path for path in (DOCS.parent / "bench").glob("*.py") if "__main__" in path.read_text(encoding="utf-8"))
    bench = {f"bench.{path.stem}".removesuffix(".__main__") for path in modules}
    assert bench - {"bench.link_check", "bench.link_relay"} <= programs  # programs that bench.cluster starts
    assert {f"mpicoll {name}" for name in ("algorithms", "explain", *_MODULES)} <= programs


def test_references_to_what_does_not_exist_are_not_excused(extension: ModuleType) -> None:
    assert extension._lookup("mpicoll.schedules.verify_schedule.verify", "", "")
    assert extension._lookup("Schedule", "mpicoll.schedules.types", "")
    for target in (
        "mpicoll.schedules.verify_schedule.vrify",
        "Shcedule",
        "mpicoll.nothing",
        "mpicoll.Intracomm.Alreduce",
    ):
        with pytest.raises(LookupError):
            extension._lookup(target, "mpicoll.schedules.types", "")


def test_every_public_name_is_in_the_reference(site: dict[Path, Page]) -> None:
    import mpicoll
    import mpicoll.train

    anchors = set().union(*(page.anchors for page in site.values()))
    for name in mpicoll.__all__:
        if name not in ("__version__", "errors"):
            assert f"mpicoll.{name}" in anchors
    for name in mpicoll.train.__all__:
        assert f"mpicoll.train.{name}" in anchors
    for name, kind in vars(mpicoll.errors).items():
        if isinstance(kind, type) and issubclass(kind, mpicoll.errors.MpicollError):
            assert f"mpicoll.errors.{name}" in anchors


@pytest.mark.parametrize("name", ["README.md", "examples/README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_links_of_other_documents_lead_to_files(name: str) -> None:
    document = REPOSITORY / name
    links = re.findall(r"\]\(([^)#:]+)\)|(?:src|srcset)=\"([^\":]+)\"", document.read_text())
    missing = [link for pair in links for link in pair if link and not (document.parent / link).exists()]
    assert not missing


def test_the_readme_is_short() -> None:
    assert len((REPOSITORY / "README.md").read_text().splitlines()) <= 150
