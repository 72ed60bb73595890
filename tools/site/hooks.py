"""What mkdocs does not do by itself with a repository whose pages lie where they belong.

- README.md is the first page. What a page links to outside docs/ comes into the site as well: other
  Markdown files as pages, source files as pages that show them, pictures and data as they are.
- Pages of docs/ that the navigation does not name stand at its end.
- The API reference: every public name, from its docstring.

Whatever a link does not lead to ends the build, since mkdocs.yml makes warnings errors.
"""

from __future__ import annotations

import importlib
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]

_LINK = re.compile(r"(?<=\]\()([^()\s]+)(?=\))")
_FENCE = re.compile(r"^ *(```|~~~)")
_LANGUAGES = {".h": "c", ".c": "c", ".cpp": "cpp", ".py": "python", ".pyx": "cython", ".sh": "bash"}
_SHOWN_AS_THEY_ARE = {".svg", ".png", ".json", ".html"}

#: The API reference: a page, what opens it, and the public names on it.
API: list[tuple[str, str, list[str]]] = [
    ("KVCache", "The cache of a whole model, and what marks its moments.",
     ["KVCache", "KvCacheSnapshot", "KvCachePolicy", "LayerPolicy", "Rope"]),
    ("Layers", "One layer, a class for each storage format. All have the methods of the first.",
     ["QuantizedKvLayer", "Float32KvLayer", "Float16KvLayer", "Bfloat16KvLayer", "Fp8E4m3KvLayer",
      "Fp8E5m2KvLayer", "Fp8KvLayer", "Int4KvLayer",
      "Q8_0KvLayer"]),
    ("Many sequences", "Sequences that share a pool of blocks.",
     ["PagedKvCache", "KvBlockPool", "PagedSnapshot"]),
    ("Below eight bits", "Keys and values of one layer at 2 to 8 bits.",
     ["MultiHeadKvCache", "KvCacheConfig", "KvCacheHead"]),
]  # fmt: skip
_SAME_METHODS = "QuantizedKvLayer"  # other layers' pages do not repeat them


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill the navigation: the API reference, and pages that it does not name."""
    assert config.nav is not None
    named = {page for entry in config.nav for page in entry.values() if isinstance(page, str)}
    there = {
        path.relative_to(config.docs_dir).as_posix() for path in Path(config.docs_dir).rglob("*.md")
    }
    for entry in config.nav:
        if "API reference" in entry:
            entry["API reference"] = [{title: _api_uri(title)} for title, _, _ in _api()]
    more = sorted(there - named)
    more += [
        path
        for path in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
        if (ROOT / path).exists()
    ]
    config.nav.append({"More": more})
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Fetch what lies outside docs/, as far as links reach."""
    for title, text, names in _api():
        files.append(File.generated(config, _api_uri(title), content=_api_page(title, text, names)))
    waiting = [path for path in _repository_files(config) if path.suffix == ".md"]
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        uri = _site_uri(path)
        if files.get_file_from_path(uri) is None:
            files.append(File.generated(config, uri, **_source(path)))
        if path.suffix == ".md":
            linked = {
                target for _, target, _ in _links(path.read_text(), path) if target is not None
            }
            waiting += linked - seen
            seen |= linked
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links lead to the places that files have in the site."""
    path = _repository_path(page.file.src_uri)
    if path is None:  # made here
        return markdown
    here = posixpath.dirname(page.file.src_uri)
    text = markdown.splitlines()
    for number, target, link in _links(markdown, path):
        if target is None:
            text[number] = re.sub(rf"\[([^\]]*)\]\({re.escape(link)}\)", r"\1", text[number])
            continue
        fragment = link[len(link.partition("#")[0]) :]
        uri = posixpath.relpath(_site_uri(target), here or ".") + fragment
        text[number] = text[number].replace(f"]({link})", f"]({uri})", 1)
    # GitHub takes words after the language of a block; here they would end it as a block.
    return "\n".join(re.sub(r"^(```\w+) [\w-]+$", r"\1", line) for line in text) + "\n"


def on_page_content(html: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Name classes of the API as a user does, and resolve the roles of docstrings."""
    if not page.file.src_uri.startswith("api/"):
        return html
    for name, path in _paths().items():
        base = path.rpartition(".")[2]
        if base != name:
            html = re.sub(rf"(>[^<]*)\b{base}\b(?=[^<]*<)", rf"\g<1>{name}", html)
    return re.sub(r":(?:class|meth|attr|func|mod|data):<code>([^<]*)</code>", _reference, html)


# ---- the repository's files and their places in the site ----------------------------------------


def _repository_files(config: MkDocsConfig) -> Iterator[Path]:
    """Where links are followed from."""
    yield from Path(config.docs_dir).rglob("*.md")
    for name in (
        "README.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "bench/README.md",
        "bench/METHOD.md",
    ):
        if (ROOT / name).exists():
            yield ROOT / name


def _site_uri(path: Path) -> str:
    inside = path.relative_to(ROOT).as_posix()
    if inside == "README.md":
        return "index.md"
    if inside.startswith("docs/"):
        return inside.removeprefix("docs/")
    as_it_is = path.suffix == ".md" or path.suffix in _SHOWN_AS_THEY_ARE
    return inside if as_it_is else f"source/{inside}.md"


def _repository_path(uri: str) -> Path | None:
    """The file that a page shows, if links in it are relative to that."""
    if uri == "index.md":
        return ROOT / "README.md"
    for path in (ROOT / "docs" / uri, ROOT / uri):
        if path.is_file():
            return path
    return None


def _source(path: Path) -> dict[str, Any]:
    """The content of a generated file."""
    if path.suffix == ".md" or path.suffix in _SHOWN_AS_THEY_ARE:
        return {"abs_src_path": str(path)}
    language = _LANGUAGES.get(path.suffix, "text")
    name = path.relative_to(ROOT).as_posix()
    return {"content": f"# `{name}`\n\n~~~~{language}\n{path.read_text()}\n~~~~\n"}


def _links(text: str, path: Path) -> Iterator[tuple[int, Path | None, str]]:
    """Links of a Markdown file into the repository: line, file (None: a folder), as written."""
    inside = False
    for number, line in enumerate(text.splitlines()):
        if _FENCE.match(line):
            inside = not inside
        if inside:
            continue
        for link in _LINK.findall(line):
            target = link.partition("#")[0]
            if not target or ":" in target:
                continue
            found = (path.parent / target).resolve()
            if found.is_dir():
                found = found / "README.md"
                yield number, found if found.exists() else None, link
            elif found.is_file() and found.is_relative_to(ROOT):
                yield number, found, link


# ---- the API reference ---------------------------------------------------------------------------


def _api() -> list[tuple[str, str, list[str]]]:
    """The pages, with all public names; a name that no page has is a function or an error."""
    kvedge = importlib.import_module("kvedge")
    known = {name for _, _, names in API for name in names}
    rest = [
        name for name in kvedge.__all__ if name not in known and callable(getattr(kvedge, name))
    ]
    errors = [name for name in rest if isinstance(getattr(kvedge, name), type)
              and issubclass(getattr(kvedge, name), BaseException)]  # fmt: skip
    missing = known - set(kvedge.__all__)
    if missing:
        raise PluginError(
            f"tools/site/hooks.py names what kvedge has not: {', '.join(sorted(missing))}"
        )
    functions = [name for name in rest if name not in errors]
    return [
        *API,
        (
            "Functions",
            "Batches of layers, partial results, rows, threads, where C finds things.",
            functions,
        ),
        (
            "Errors",
            "Each is a KvedgeError, and the builtin that one would expect in its place.",
            errors,
        ),
    ]


def _api_uri(title: str) -> str:
    return f"api/{title.lower().replace(' ', '-')}.md"


def _paths() -> dict[str, str]:
    """Where the docstring of each public name is, for a tool that reads sources."""
    kvedge = importlib.import_module("kvedge")
    found = {}
    for _, _, names in _api():
        for name in names:
            module = getattr(kvedge, name).__module__
            if name == "KVCache":
                path = "kvedge.cache.cache.KVCache"
            elif not module.startswith("kvedge.backends.n"):
                path = f"{module}.{name}"
            elif name.endswith("KvLayer"):
                path = f"kvedge.layer.types.{name}"
            else:
                path = f"kvedge.batch.{name}"
            found[name] = path
    return found


def _api_page(title: str, text: str, names: list[str]) -> str:
    paths = _paths()
    parts = [f"# {title}\n\n{text}\n"]
    for name in names:
        lines = [
            f"::: {paths[name]}",
            "    options:",
            f"      heading: {name}",
            f"      toc_label: {name}",
        ]
        if name.endswith("KvLayer") and name != _SAME_METHODS and name != "Fp8KvLayer":
            lines += ["      members: false", "      inherited_members: false"]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _reference(role: re.Match[str]) -> str:
    """A link to a public name; other names as they are."""
    full = role[1].strip("~")
    name = full.removeprefix("kvedge.").partition(".")[0]
    for title, _, names in _api():
        if full.startswith("kvedge.") and name in names:
            page = posixpath.basename(_api_uri(title)).removesuffix(".md")
            shown = full.removeprefix("kvedge.")
            return f'<a href="{page}.html#{_paths()[name]}"><code>{shown}</code></a>'
    return f"<code>{full}</code>"
