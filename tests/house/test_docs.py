"""What the documents show runs: the README's Python, the examples, the links."""

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench.__main__ import PROGRAMS
from kvedge.bench.catalog import BENCHMARKS

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "bench").glob("*.md")),
]


def run(arguments, **options):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(
        arguments, env=env, capture_output=True, text=True, check=False, timeout=300, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def blocks(language, document="README.md"):
    text = (ROOT / document).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@pytest.mark.check
@pytest.mark.parametrize("document", ["README.md", "docs/python.md"])
def test_the_python_of_a_document_runs(document, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = blocks("python", document)
    assert len(code) >= 2
    names = {}
    for block in code:  # a later block goes on where the one before it stopped
        exec(compile(block, document, "exec"), names)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_that_exist(path):
    for target in re.findall(r"\]\(([^)#]+)", re.sub(r"(?ms)^```.*?^```", "", path.read_text())):
        if not target.startswith("http"):
            assert (path.parent / target).exists(), target


def test_the_picture_of_the_architecture_is_what_its_script_draws():
    drawn = runpy.run_path(str(ROOT / "tools" / "draw_architecture.py"))["draw"]()
    assert (ROOT / "docs" / "architecture.svg").read_text() == drawn


# Those with transformers: tests/transformers/test_examples.py.
PLAIN_EXAMPLES = [
    path
    for path in sorted((ROOT / "examples").glob("*.py"))
    if "transformers" not in path.read_text()
]


@pytest.mark.check
@pytest.mark.subprocess
@pytest.mark.parametrize("path", PLAIN_EXAMPLES, ids=lambda p: p.name)
def test_examples_run(path, tmp_path):
    assert run([sys.executable, str(path)], cwd=tmp_path)


needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


@needs_cc
@pytest.mark.check
@pytest.mark.subprocess
def test_the_c_example_compiles_and_agrees_with_itself(tmp_path):
    program = tmp_path / "runtime"
    csrc = sorted(map(str, (ROOT / "csrc").rglob("*.c")))
    example = str(ROOT / "examples" / "c_runtime" / "main.c")
    command = ["cc", "-std=c11", "-O0", "-pthread", f"-I{ROOT / 'csrc'}", "-o", str(program)]
    run([*command, example, *csrc, "-lm"])
    assert "equal to the bit" in run([str(program)])


@needs_cc
@pytest.mark.check
@pytest.mark.subprocess
def test_the_readmes_c_compiles(tmp_path):
    (block,) = blocks("c")
    include, _, body = block.partition("\n\n")
    program = tmp_path / "program.c"
    head = "int f(const float *keys, const float *values, const float *query, float *out)"
    program.write_text(f"{include}\n{head};\n{head} {{\n{body}return 0; }}\n")
    run(
        ["cc", "-std=c11", "-Wall", "-Werror", f"-I{ROOT / 'csrc'}", "-c", str(program)],
        cwd=tmp_path,
    )


# ---- what csrc/kvedge.h and docs/c_api.md say of the sources -----------------------------------


def calls_in(folder, functions):
    """Where C files of a folder of csrc/ call one of the functions."""
    call = re.compile(rf"(?<![\w.>])({'|'.join(functions)})\s*\(")
    found = []
    for path in sorted((ROOT / "csrc" / folder).rglob("*.[ch]")):
        text = re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)
        found += [f"{path.relative_to(ROOT)}: {name}" for name in call.findall(text)]
    return found


def test_the_c_core_neither_prints_nor_ends_the_process():
    printing = ["printf", "fprintf", "vprintf", "puts", "fputs", "putchar", "perror", "write"]
    ending = ["exit", "_exit", "_Exit", "quick_exit", "abort", "assert", "raise", "longjmp"]
    assert calls_in("", printing + ending) == []


def test_no_kernel_allocates():
    allocating = ["malloc", "calloc", "realloc", "aligned_alloc", "alloca", "mmap", "free"]
    allocating += ["kvedge_aligned_alloc", "kvedge_aligned_free"]
    assert calls_in("", allocating)  # the pattern finds those of other folders
    assert calls_in("kernels", allocating) + calls_in("formats", allocating) == []


# ---- what documents name is there ---------------------------------------------------------------

# Of other programs, of formulas, of data that is not here.
FOREIGN = {"get_throttled", "measure_temp", "lse_i", "out_i", "tinystories_val"}
ELSEWHERE = {"CHANGELOG.md", "TRIED.md", "ggml.md"}  # of what was, and of llama.cpp
MANUALS = [
    path
    for folder in (".", "docs", "bench", "csrc", "kvedge", "tests", "examples", "tools")
    for path in sorted((ROOT / folder).glob("*.md" if folder == "." else "**/*.md"))
    if path.name not in ELSEWHERE
]
SOURCES = [
    path
    for folder in ("kvedge", "csrc", "integrations", "tests", "tools", "bench", "examples", ".")
    for path in (ROOT / folder).glob("*" if folder == "." else "**/*")
    if path.suffix in {".py", ".pyx", ".pxi", ".pxd", ".c", ".h", ".sh", ".toml", ".yml", ".cpp"}
    or path.name in {"Makefile", "CMakeLists.txt"}
    if path.name != "native.c"
]


def spans(path):
    """What stands in backticks in a document, outside of its blocks of code."""
    return set(re.findall(r"`([^`\n]+)`", re.sub(r"(?ms)^```.*?^```", "", path.read_text())))


@pytest.fixture(scope="module")
def words():
    """Every identifier of the sources, and of the names of files; those of C alone."""
    found, of_c = set(), set()
    for path in SOURCES:
        own = set(re.findall(r"\w+", path.read_text(errors="ignore") + path.name))
        found |= own
        of_c |= own if path.suffix in (".c", ".h") else set()
    return found, of_c


@pytest.mark.parametrize("path", MANUALS, ids=lambda path: str(path.relative_to(ROOT)))
def test_identifiers_in_documents_exist(path, words):
    missing = []
    for span in spans(path):
        for name in re.findall(r"\w+", span):
            if "_" not in name.strip("_") or name.endswith(("_NAME", "_")):  # any name
                continue
            if name in words[0] or name in FOREIGN:
                continue
            # `_attend_layers` is short for kvedge_attend_layers.
            if not name.startswith("_") or not any(word.endswith(name) for word in words[1]):
                missing.append(f"{name} in `{span}`")
    assert not missing


def test_fields_in_the_tables_of_threads_are_of_the_files_beside_them():
    files = {path.relative_to(ROOT).as_posix(): path for path in SOURCES}
    checked, wrong, held = 0, [], []
    for row in re.findall(r"(?m)^\|(.*)\|$", (ROOT / "docs" / "threads.md").read_text()):
        file, shared, *_ = [cell.strip() for cell in re.split(r"(?<!\\)\|", row)]
        named = re.findall(r"`([\w/]+\.(?:py|pyx|c))`", file)
        if file:
            held = [
                path.read_text()
                for name in named
                for place, path in files.items()
                if place in (f"kvedge/{name}", f"csrc/{name}")
            ]
        for field in re.findall(r"`(\w+)`", shared) if held else ():
            checked += 1
            if not any(re.search(rf"(?<!\w){field}\b", text) for text in held):
                wrong.append(f"{field}: {file}")
    assert checked > 10 and not wrong


def test_the_architecture_names_every_folder_and_module():
    text = (ROOT / "docs" / "architecture.md").read_text()
    parts = [path for path in (ROOT / "kvedge").iterdir() if not path.name.startswith("_")]
    names = [path.name for path in parts if path.suffix == ".py"]
    names += [f"{path.name}/" for path in parts if (path / "__init__.py").is_file()]
    names += [f"csrc/{path.name}/" for path in (ROOT / "csrc").iterdir() if path.is_dir()]
    assert [name for name in names if name not in text and name != "data/"] == []


def test_folders_of_c_include_what_the_architecture_says():
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"(?m)^\| \[`csrc/(\w+)/`\]\([^)]*\) \|[^|]*\| ([^|]*) \|$", text)
    assert {name for name, _ in rows} == {p.name for p in (ROOT / "csrc").iterdir() if p.is_dir()}
    wrong = []
    for name, may in rows:
        allowed = [own.rstrip("/") for own in re.findall(r"`([^`]+)`", may)] + [name]
        for path in (ROOT / "csrc" / name).rglob("*.[ch]"):
            for other in re.findall(r'(?m)^ *# *include "([^"]+/[^"]+)"', path.read_text()):
                folder, _, file = other.partition("/")
                if folder not in allowed and other not in allowed and file not in allowed:
                    wrong.append(f"{path.relative_to(ROOT)}: {other}")
    assert not wrong


def test_grids_have_the_kernels_that_the_documents_say():
    """x86 has a cell for them, NEON and scalar have none."""
    has = {
        path.name: any(re.search(r"\.grids = ", file.read_text()) for file in path.rglob("*.[ch]"))
        for path in (ROOT / "csrc" / "kernels").iterdir()
        if path.is_dir()
    }
    assert {name for name, found in has.items() if found} == {"avx256", "avx512vnni"}
    for document in ("csrc/kvedge.h", "csrc/formats/README.md"):
        assert re.search(r"paths\W+of\W+x86\W+have", (ROOT / document).read_text()), document


def test_runs_are_multiplied_as_the_documents_say():
    """As integers on AVX-512, on the 256-bit paths and on NEON; scalar has floats alone."""
    kernels = ROOT / "csrc" / "kernels"
    pairs = {
        path.relative_to(kernels).parts[0]
        for path in kernels.rglob("*/*.[ch]")
        if '#include "kernels/kivi_pairs.h"' in path.read_text()
    }
    assert pairs == {"avx256", "neon"}
    text = " ".join((ROOT / "docs" / "numerics.md").read_text().split())
    assert "AVX2, AVX-VNNI and NEON (aarch64) multiply codes as integers of 16 bits" in text


def test_the_manual_of_benchmarks_lists_all():
    manual = (ROOT / "bench" / "README.md").read_text()
    for command, modules in (("kvedge bench", BENCHMARKS), ("python -m bench", PROGRAMS)):
        listed = set(re.findall(rf"(?m)^{command} (\S+) ", manual))
        assert {module.NAME for module in modules} == listed - {"show"}
