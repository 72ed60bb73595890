"""What the documents show runs: the README's Python, the examples, the links."""

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("document", ["README.md", "docs/python.md"])
def test_the_python_of_a_document_runs(document, tmp_path, monkeypatch):
    pytest.importorskip("safetensors")
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


@pytest.mark.subprocess
@pytest.mark.parametrize("path", PLAIN_EXAMPLES, ids=lambda p: p.name)
def test_examples_run(path, tmp_path):
    assert run([sys.executable, str(path)], cwd=tmp_path)


needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


@needs_cc
@pytest.mark.subprocess
def test_the_c_example_compiles_and_agrees_with_itself(tmp_path):
    program = tmp_path / "runtime"
    csrc = sorted(map(str, (ROOT / "csrc").rglob("*.c")))
    example = str(ROOT / "examples" / "c_runtime" / "main.c")
    command = ["cc", "-std=c11", "-O0", "-pthread", f"-I{ROOT / 'csrc'}", "-o", str(program)]
    run([*command, example, *csrc, "-lm"])
    assert "equal to the bit" in run([str(program)])


@needs_cc
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
