"""What the package shows: documented names, types for checkers, errors that are builtins too."""

import ast
import builtins
import importlib
import inspect
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import kvedge
from kvedge import errors
from kvedge.core.storage import Storage
from kvedge.distributed import ShardedKVCache
from kvedge.layer.store import LayerStore

ROOT = Path(__file__).parents[2]
PACKAGE = Path(kvedge.__file__).parent

PUBLIC = [name for name in kvedge.__all__ if name not in ("__version__", "backend")]
CLASSES = [
    kvedge.QuantizedKvLayer,
    kvedge.Float32KvLayer,
    kvedge.KVCache,
    kvedge.KvCacheSnapshot,
    kvedge.Rope,
    kvedge.StateLayer,
    kvedge.DeltaState,
    kvedge.MambaState,
    kvedge.ConvState,
    kvedge.KeyIndex,
    kvedge.KvBlockPool,
    kvedge.PagedKvCache,
    kvedge.PagedSnapshot,
    ShardedKVCache,
]


def members():
    """Every public method and property of every public class: (class, name)."""
    return [
        pytest.param(cls, name, id=f"{cls.__name__}.{name}")
        for cls in CLASSES
        for name in dir(cls)
        if not name.startswith("_")
    ]


def functions():
    """Every public callable with arguments: methods, and functions of the package."""
    methods = {param.id: getattr(*param.values) for param in members()}
    everything = {**methods, **{name: getattr(kvedge, name) for name in PUBLIC}}
    return [
        pytest.param(function, id=name)
        for name, function in everything.items()
        if inspect.isroutine(function)
    ]


def test_all_names_exist_and_are_sorted_once():
    for name in kvedge.__all__:
        assert hasattr(kvedge, name), name
    assert len(set(kvedge.__all__)) == len(kvedge.__all__)


def test_dir_shows_the_public_names_and_nothing_else():
    assert dir(kvedge) == sorted(kvedge.__all__)
    assert not {"TYPE_CHECKING", "is_for_the_command", "sys", "annotations"} & vars(kvedge).keys()


def test_the_names_of_the_design_are_public():
    names = "QuantizedKvLayer Float32KvLayer KVCache KvCacheSnapshot Rope isa_info backend"
    names += " set_num_threads get_num_threads KvBlockPool PagedKvCache"
    assert set(names.split()) | set(errors.__all__) <= set(kvedge.__all__)


def test_the_version_is_a_version():
    assert re.fullmatch(r"\d+\.\d+(\.\d+)?([ab.]\S+)?", kvedge.__version__)
    assert kvedge.backend in ("native", "numpy")


# -- docstrings ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_has_a_docstring(name):
    doc = inspect.getdoc(getattr(kvedge, name))
    assert doc and len(doc) > 15, f"{name}: {doc!r}"
    assert doc[0].isupper() and "." in doc


@pytest.mark.parametrize(("cls", "name"), members())
def test_every_public_member_has_a_docstring(cls, name):
    member = getattr(cls, name)
    doc = inspect.getdoc(member)
    if name in getattr(cls, "__dataclass_fields__", ()):
        doc = cls.__doc__ if name in cls.__doc__ else None  # a field, told of in its class
    assert doc and len(doc) > 10, f"{cls.__name__}.{name} has no docstring"


@pytest.mark.parametrize("cls", CLASSES)
def test_help_shows_every_class(cls):
    assert cls.__doc__ and len(cls.__doc__) > 60  # help() does not show that of a base


ATTEND_OPTIONS = [
    "scale", "causal", "window", "sink_tokens", "sink_logits", "softcap", "mask", "tokens", "start",
    "alibi_slopes", "precision_bits", "return_lse", "out", "num_threads", "layout",
]  # fmt: skip


@pytest.mark.parametrize(
    "attend",
    [cls.attend for cls in (*CLASSES[:3], kvedge.PagedKvCache)] + [kvedge.attend_batch],
    ids=lambda function: function.__qualname__,
)
def test_every_attend_names_its_options(attend):
    parameters = inspect.signature(attend).parameters.values()
    options = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
    assert options == ATTEND_OPTIONS
    assert not [each for each in parameters if each.kind is each.VAR_KEYWORD]
    assert attend.__doc__


@pytest.mark.parametrize("name", ["sliding_window", "batch", "head_dim", "state", "lengths"])
def test_every_attend_refuses_options_that_there_are_not(name):
    row, query = np.ones((1, 1, 8), np.float32), np.ones((1, 8), np.float32)
    cache = kvedge.KVCache(1, 1, 8)
    cache.push_step(row, row)
    paged = kvedge.PagedKvCache(kvedge.KvBlockPool(1, 4, 1, 1, 8, scale_dtype="float32"))
    seq = paged.from_kv_cache(cache)
    layer = kvedge.QuantizedKvLayer(1, 1, 8)
    layer.extend(row, row)
    for attend in (
        lambda **options: layer.attend(query, **options),
        lambda **options: cache.attend(0, query, **options),
        lambda **options: paged.attend(seq, 0, query, **options),
        lambda **options: paged.attend_batch([seq], 0, query[None], **options),
        lambda **options: kvedge.attend_batch([layer], query[None], **options),
    ):
        attend(scale=1.0)
        with pytest.raises(TypeError, match=f"(unexpected|positional-only) .*'{name}'"):
            attend(**{name: 3})


STORAGE = set(Storage.__dataclass_fields__)


@pytest.mark.parametrize(
    ("make", "size", "lacks"),
    [
        (kvedge.KVCache, (1, 1, 8), set()),
        (kvedge.Int4KvLayer, (4, 1, 8), {"dtype", "key_dtype"}),
        (kvedge.KvBlockPool, (1, 32, 1, 1, 8), {"key_offset"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_every_constructor_shows_the_options_of_storage_and_refuses_others(make, size, lacks):
    shown = inspect.signature(make).parameters
    assert {name for name in shown if name in STORAGE} == STORAGE - lacks
    assert not [each for each in shown.values() if each.kind is each.VAR_KEYWORD]
    make(*size, **{name: shown[name].default for name in STORAGE - lacks})
    for name in (*lacks, "groups", "capacities"):
        with pytest.raises(TypeError, match=rf"{make.__name__}\(\) got an unexpected .*'{name}'"):
            make(*size, **{name: None})


def parameters_of(function):
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        pytest.skip("no signature")
    return [name for name in signature.parameters if name not in ("self", "cls", "memo")]


@pytest.mark.parametrize("function", functions())
def test_docstrings_tell_of_every_parameter(function):
    doc = inspect.getdoc(function) or ""
    if re.search(r"\b(as|see|See|As for|name of) :meth:", doc) or "as for the class" in doc:
        return  # told where the reader is sent
    missing = [name for name in parameters_of(function) if not re.search(rf"\b{name}\b", doc)]
    assert not missing, f"not told of: {missing}"


@pytest.mark.parametrize("function", functions())
def test_docstring_sections_are_those_of_numpy(function):
    doc = inspect.getdoc(function) or ""
    lines = doc.splitlines()
    sections = ("Parameters", "Returns", "Raises", "Notes", "Examples", "Yields")
    for title, rule in pairwise(lines):
        if title.strip() in sections:
            assert rule.strip() == "-" * len(title.strip()), f"{title} is not underlined"
    found = [line.strip() for line in lines if line.strip() in sections]
    order = [section for section in ("Parameters", "Returns", "Raises") if section in found]
    assert [section for section in found if section in order] == order


@pytest.mark.parametrize("cls", CLASSES[:3])
def test_constructors_are_documented(cls):
    doc = f"{cls.__doc__}\n{cls.__init__.__doc__}"
    for name in ("num_kv_heads", "head_dim", "Parameters"):
        assert name in doc


@pytest.mark.parametrize("name", errors.__all__)
def test_documented_errors_exist_and_are_builtins_too(name):
    error = getattr(errors, name)
    assert getattr(kvedge, name) is error
    assert issubclass(error, errors.KvedgeError)
    if error is not errors.KvedgeError:
        others = [base for base in error.__mro__ if base.__module__ == "builtins"]
        assert any(base is not Exception and hasattr(builtins, base.__name__) for base in others)


def test_docstrings_name_only_errors_that_exist():
    for cls in CLASSES:
        for name in dir(cls):
            doc = inspect.getdoc(getattr(cls, name)) or ""
            if name.startswith("__") and name != "__init__":
                continue
            for word in re.findall(r"\b[A-Z]\w+Error\b", doc):
                assert hasattr(errors, word) or hasattr(builtins, word), f"{name}: {word}"


# -- types ---------------------------------------------------------------------------------------


def test_the_package_is_marked_as_typed():
    assert (PACKAGE / "py.typed").is_file()


def stub():
    """The declarations of kvedge/backends/native.pyi: {class or function: {members} or None}."""
    path = PACKAGE / "backends" / "native.pyi"
    if not path.exists():
        pytest.skip("no extension in this build")
    found = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = {
                item.name if isinstance(item, ast.FunctionDef) else item.target.id
                for item in node.body
                if isinstance(item, (ast.FunctionDef, ast.AnnAssign))
            }
        elif isinstance(node, ast.FunctionDef):
            found[node.name] = None
    return found


def native():
    """The extension in use: only then has it its public classes, which are made over its cores."""
    if kvedge.backend != "native":
        pytest.skip("the extension is not in use")
    return importlib.import_module("kvedge.backends.native")


def test_the_stub_declares_what_the_extension_has():
    module, declared = native(), stub()
    for name, names in declared.items():
        assert hasattr(module, name), f"the stub declares {name}, the extension has none"
        for member in names or ():
            assert hasattr(getattr(module, name), member), f"{name}.{member}"
    public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    own = [n for n in public if getattr(public[n], "__module__", None) == module.__name__]
    assert set(own) <= set(declared), f"not in the stub: {set(own) - set(declared)}"


def test_the_stub_declares_every_public_member_of_the_classes():
    module, declared = native(), stub()
    for name, names in declared.items():
        if names is None:
            continue
        cls = getattr(module, name)
        own = {
            member
            for base in cls.__mro__
            if base.__module__ == module.__name__
            for member in vars(base)
            if not member.startswith("_")
        }
        known = set(names) | vars(LayerStore).keys() | LayerStore.__annotations__.keys()
        for base in cls.__mro__:  # the plain bases, which declare what a core has to provide
            if base.__module__ != module.__name__ and base is not object:
                known |= vars(base).keys()
        for base in cls.__mro__[1:]:
            known |= declared.get(base.__name__) or set()
        assert own <= known, f"{name}: not in the stub: {own - known}"


# -- imports -------------------------------------------------------------------------------------


@pytest.mark.subprocess
def test_importing_needs_numpy_and_nothing_else():
    code = (
        "import sys, kvedge\n"
        "extras = 'safetensors gguf rich ml_dtypes click torch matplotlib hypothesis'.split()\n"
        "print([name for name in extras if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@pytest.mark.subprocess
def test_importing_starts_no_thread():
    code = "import threading, kvedge, os\nprint(len(os.listdir('/proc/self/task')))"
    if not Path("/proc/self/task").is_dir():
        pytest.skip("reads /proc")
    alone = "import threading, numpy, os\nprint(len(os.listdir('/proc/self/task')))"
    counts = [
        int(subprocess.run([sys.executable, "-c", each], check=True, capture_output=True).stdout)
        for each in (alone, code)
    ]
    assert counts[1] <= counts[0]


def test_the_page_of_the_c_api_names_every_function_of_the_header():
    header = (ROOT / "csrc/kvedge.h").read_text()
    code = re.sub(r"/\*.*?\*/", "", header, flags=re.DOTALL)
    declared = set(re.findall(r"\b(kvedge_\w+)\(", code))
    assert len(declared) > 40
    page = (ROOT / "docs/c_api.md").read_text()
    table = page[page.index("**All functions**") : page.index("**Stability.**")]
    assert set(re.findall(r"`(kvedge_\w+)`", table)) == declared
