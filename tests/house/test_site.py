"""The documentation site: `make docs` in a copy, and what ends it."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

import kvedge

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.check,
    pytest.mark.subprocess,
    pytest.mark.skipif(
        any(
            importlib.util.find_spec(name) is None
            for name in ("mkdocs", "material", "mkdocstrings")
        ),
        reason="needs kvedge[docs]",
    ),
]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of what pages are made from."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in ("docs", "bench", "csrc", "examples", "tools", "tests", "kvedge"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True)
    for path in (*ROOT.glob("*.md"), ROOT / "mkdocs.yml"):
        shutil.copy(path, copy)
    return copy


def build(checkout):
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(checkout)}
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build"],
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


class Page(HTMLParser):
    """What a page links to and fetches."""

    def __init__(self, text):
        super().__init__()
        self.links, self.fetched, self.ids = [], [], set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        of = dict(attributes)
        self.ids.add(of.get("id"))
        if tag == "a" and of.get("href"):
            self.links.append(of["href"])
        elif tag in ("script", "img", "link", "iframe") and of.get("rel") != "canonical":
            self.fetched.append(of.get("src") or of.get("href") or "")


def test_the_site_is_whole_and_opens_without_network(checkout):
    done = build(checkout)
    assert done.returncode == 0, done.stdout + done.stderr
    site = checkout / "build" / "site"
    pages = {
        path: Page(path.read_text()) for path in site.rglob("*.html") if path.name != "404.html"
    }
    titles = {"index", "python", "transformers", "c_api", "formats", "raspberry-pi", "numerics"}
    assert titles | {"promises", "architecture", "threads"} <= {path.stem for path in pages}
    for path, page in pages.items():
        for target in page.links + page.fetched:
            if re.match("https?:|mailto:", target):
                assert target not in page.fetched, f"{path} fetches {target}"
                continue
            name, _, fragment = target.partition("#")
            found = (path.parent / unquote(name)).resolve() if name else path
            assert found.exists(), f"{path.relative_to(site)} leads to {target}"
            if fragment and found in pages and not fragment.startswith("__"):
                assert fragment in pages[found].ids, f"{path.relative_to(site)} leads to {target}"


def test_every_public_name_is_in_the_reference(checkout):
    text = "".join(path.read_text() for path in (checkout / "build/site/api").glob("*.html"))
    headings = set(re.findall(r"doc-symbol-heading[^>]*></code>\s*(\w+)", text))
    names = {name for name in kvedge.__all__ if callable(getattr(kvedge, name))}
    assert names <= headings, names - headings
    assert not re.search(r":(class|meth|attr|func):", text)


def test_a_page_that_the_navigation_does_not_name_is_picked_up(checkout):
    (checkout / "docs" / "another.md").write_text("# Another subject\n\n[up](formats.md)\n")
    done = build(checkout)
    (checkout / "docs" / "another.md").unlink()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Another subject" in (checkout / "build" / "site" / "index.html").read_text()


@pytest.mark.parametrize("link", ["nowhere.md", "../csrc/nowhere.c", "formats.md#nowhere"])
def test_a_dead_link_ends_the_build(checkout, link):
    page = checkout / "docs" / "another.md"
    page.write_text(f"# Another\n\n[dead]({link})\n")
    done = build(checkout)
    page.unlink()
    assert done.returncode != 0 and "nowhere" in done.stdout + done.stderr
