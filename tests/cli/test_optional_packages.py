"""Optional packages that are installed and cannot be used: one line says why."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvedge import llama_cpp
from kvedge.cli import llama_cpp_model, main
from kvedge.console import exits
from kvedge.core.packages import PACKAGES
from kvedge.data import STORIES_MODEL
from kvedge.llama import LlamaModel

pytestmark = pytest.mark.subprocess

# How a package fails when it is imported, or what it lacks; and what is told of it.
WAYS = {
    "RuntimeError": ("raise RuntimeError('no AVX here\\nand more')", "(RuntimeError: no AVX here)"),
    "ImportError": ("raise ImportError('libx.so.1: no such file')", "(ImportError: libx.so.1: no"),
    "ModuleNotFoundError": ("import no_such_module_at_all", "no_such_module_at_all"),
    "AttributeError": ("import os; os.no_such_name", "no_such_name"),
    "FileNotFoundError": ("raise FileNotFoundError('no library')", "(FileNotFoundError: no lib"),
    "OSError": ("import ctypes; ctypes.CDLL('/no/such.so')", "(OSError: /no/such.so"),
    "SystemExit": ("raise SystemExit(3)", "(SystemExit: 3)"),
    "names": ("__version__ = '99'", "too old"),
}


def broken(folder, modules, source):
    for module in modules:
        (folder / module).mkdir()
        (folder / module / "__init__.py").write_text(source)
    return folder


def python(folder, *arguments):
    path = os.pathsep.join([str(folder), *filter(None, sys.path)])
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )


def each_way(tmp_path, modules, code, ways=WAYS):
    """What a program prints as JSON with these packages broken in each way: one process for all."""
    folders = {}
    for way, (source, _) in ways.items():
        folders[way] = tmp_path / way
        folders[way].mkdir()
        broken(folders[way], modules, source)
    program = f"""
import json, sys
for folder in sys.argv[1:]:
    sys.path.insert(0, folder)
    for name in list(sys.modules):
        if name.partition(".")[0] in {list(modules)} or name.startswith("kvedge.transformers"):
            del sys.modules[name]
    {code.strip().replace(chr(10), chr(10) + "    ")}
    sys.path.remove(folder)
"""
    done = python(tmp_path, "-c", program, *folders.values())
    assert done.returncode == 0, done.stderr
    found = map(json.loads, done.stdout.splitlines())
    return dict(zip(folders, found, strict=True))


ASK = """
from kvedge.core.packages import PACKAGES, obstacle, require
found = {}
for module in PACKAGES:
    try:
        require(module, "this needs")
    except Exception as error:
        found[module] = (type(error).__name__, str(error), type(error.__cause__).__name__)
    assert obstacle(module).partition(" ")[2] in found[module][1]
try:
    import kvedge.transformers
except Exception as error:
    cause = type(error.__cause__).__name__
    found["kvedge.transformers"] = (type(error).__name__, str(error), cause)
print(json.dumps(found))
"""


def test_every_package_that_cannot_be_imported_is_one_error_with_its_cause(tmp_path):
    ways = {**WAYS, "old": ("__version__ = '0.1'", "")}
    answers = each_way(tmp_path, PACKAGES, ASK, ways)
    for module, package in PACKAGES.items():
        if package.minimum:
            least = ".".join(map(str, package.minimum))
            assert f"(0.1; {least} or later is needed)" in answers["old"][module][1]
    for way, (_, told) in WAYS.items():
        found = answers[way]
        assert found["kvedge.transformers"][0] == "MissingExtraError"
        assert found.pop("kvedge.transformers")[2] == found["torch"][2]
        assert found.keys() == PACKAGES.keys()
        for module, (error, text, cause) in found.items():
            assert error == "MissingExtraError" and PACKAGES[module].name in text, module
            assert "\n" not in text and "not installed" not in text
            assert told in text and (cause == way or way == "names"), (module, text)
            assert way != "names" or "pip install --upgrade" in text


def test_generate_goes_on_where_kvedge_was_built_without_what_is_for_ggml(
    model, capsys, monkeypatch
):
    pytest.importorskip("llama_cpp.llama_cpp")
    monkeypatch.setattr(llama_cpp, "LIBRARY", Path("/no/such.so"))
    assert main(["generate", "-m", str(model), "-n", "3", "--json"]) == exits.OK
    made = json.loads(capsys.readouterr().out)
    assert made["engine"] == "numpy" and "without its C library" in made["engine_reason"]


@pytest.fixture
def model(tmp_path):
    gguf_files = pytest.importorskip("gguf_files")
    return gguf_files.write_gguf(tmp_path / "m.gguf", LlamaModel.from_file(STORIES_MODEL))


@pytest.mark.parametrize("way", ["OSError", "names"])  # the others: as enable() tells them
def test_generate_goes_on_without_a_llama_cpp_that_cannot_be_used(tmp_path, model, way):
    source, told = WAYS[way]
    folder = broken(tmp_path, ["llama_cpp"], source)
    generate = ("-m", "kvedge", "generate", "-m", model, "-n", 3)
    done = python(folder, *generate, "--json")
    assert done.returncode == exits.OK, done.stderr
    made = json.loads(done.stdout)
    assert made["engine"] == "numpy" and "\n" not in made["engine_reason"]
    assert "llama-cpp-python" in made["engine_reason"] and told in made["engine_reason"]
    assert len(made["tokens"]) == 3

    done = python(folder, *generate, "--engine", "llama.cpp")
    assert done.returncode == exits.UNAVAILABLE
    assert done.stderr.count("\n") == 1 and told in done.stderr


def test_what_the_engine_calls_is_asked_for_before():
    """So that a llama_cpp without one of them is too old, and no AttributeError."""
    called = set(re.findall(r"api\.(llama_\w+)", Path(llama_cpp_model.__file__).read_text()))
    assert {f"llama_cpp.{name}" for name in called} == set(llama_cpp_model.NEEDS)


def test_enable_raises_one_error_with_the_cause(tmp_path):
    if not llama_cpp.LIBRARY.is_file():
        pytest.skip("kvedge was built without its library for ggml")
    code = """
from kvedge import errors, llama_cpp
try:
    llama_cpp.enable()
except errors.BackendUnavailableError as error:
    print(json.dumps([type(error.__cause__).__name__, str(error)]))
"""
    for way, (cause, text) in each_way(tmp_path, ["llama_cpp"], code).items():
        assert WAYS[way][1] in text and cause == ("AttributeError" if way == "names" else way)


OF_THREE_PACKAGES = """
import sys
from kvedge.cli import doctor, info, main
from kvedge.core import packages

few = ("torch", "llama_cpp", "rich")
packages.PACKAGES = {name: packages.PACKAGES[name] for name in few}
info.EXTRAS = {name: tuple(set(few) & set(names)) for name, names in info.EXTRAS.items()}
doctor._on_path, doctor.run_checks = lambda path: [], list
sys.exit(main(sys.argv[1:]))
"""


def test_info_and_doctor_say_what_is_wrong(tmp_path):
    """And a package that ends the process, as on a processor too old for it, ends no command."""
    broken(tmp_path, ["torch"], "import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    broken(tmp_path, ["llama_cpp"], "print('{'); raise RuntimeError('no AVX here')")
    broken(tmp_path, ["rich"], "raise RuntimeError('no AVX here')")

    def run(*arguments):
        return python(tmp_path, "-c", OF_THREE_PACKAGES, *arguments)

    done = run("info", "--json")
    assert done.returncode == exits.OK, done.stderr
    facts = json.loads(done.stdout)
    assert not any(facts["extras"][name] for name in ("cli", "transformers", "bench"))
    wrong = "\n".join(one["what"] for one in facts["obstacles"])
    assert "torch is installed but cannot be imported (signal SIGILL)" in wrong
    for name in ("rich", "llama-cpp-python"):
        assert f"{name} is installed but cannot be imported (RuntimeError: no AVX here)" in wrong
    assert "no AVX here" in facts["llama_cpp"]["problem"]
    text = run("info").stdout
    assert "no AVX here" in text and "kvedge.llama_cpp.enable()" not in text

    done = run("doctor", "--json")
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert done.returncode == exits.FAILED and checks["optional packages"]["ok"] is False
    assert "SIGILL" in checks["optional packages"]["detail"]
    assert "no AVX here" in checks["llama.cpp attends with kvedge"]["detail"]
