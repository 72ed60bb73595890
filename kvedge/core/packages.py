"""Optional packages: whether they can be used here, and if not, why."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvedge.errors import KvedgeError, MissingExtraError

__all__ = ["PACKAGES", "installed_version", "is_installed", "obstacle", "require", "version"]


@dataclass(frozen=True)
class Package:
    """What is asked of an optional package.

    Attributes
    ----------
    name : str
        What pip calls it.
    extra : str
        The extra of kvedge that brings it; empty where it is installed by its name.
    needs : tuple of str
        Names that kvedge uses; without them it is too old, or something else that goes by its name.
    minimum : tuple of int
        The oldest version, where one that has these names may still be too old.
    """

    name: str
    extra: str
    needs: tuple[str, ...]
    minimum: tuple[int, ...] = ()

    @property
    def install(self) -> str:
        """The command that installs it."""
        return "pip install " + (f"'kvedge[{self.extra}]'" if self.extra else self.name)


_JINJA = ("sandbox.ImmutableSandboxedEnvironment", "ext.loopcontrols")
_RICH = ("box", "cells", "console", "padding", "progress", "table", "text")
_TOKENIZERS = ("Tokenizer", "Regex", "models.BPE", "pre_tokenizers.Split", "decoders.ByteLevel")
_TRANSFORMERS = (
    *("AttentionInterface", "AttentionMaskInterface", "masking_utils"),
    *("cache_utils.CacheLayerMixin", "cache_utils.DynamicLayer"),
    "cache_utils.DynamicSlidingWindowLayer",
)

#: By the name that Python imports.
PACKAGES = {
    "accelerate": Package("accelerate", "transformers", ("init_empty_weights",)),
    "gguf": Package("gguf", "gguf", ("GGMLQuantizationType", "dequantize")),
    "jinja2": Package("jinja2", "chat", _JINJA),
    "llama_cpp": Package("llama-cpp-python", "", ("llama_cpp._lib._handle", "llama_backend_init")),
    "matplotlib": Package("matplotlib", "peers", ("rc_context", "figure.Figure")),
    "onnx": Package("onnx", "peers", ("TensorProto", "helper", "numpy_helper")),
    "onnxruntime": Package("onnxruntime", "peers", ("InferenceSession", "SessionOptions")),
    "rich": Package("rich", "cli", _RICH),
    "tokenizers": Package("tokenizers", "gguf", _TOKENIZERS),
    "torch": Package("torch", "transformers", ("Tensor", "nn.functional"), (2, 5)),
    "transformers": Package("transformers", "transformers", _TRANSFORMERS, (4, 56)),
}

_LONGEST_REASON = 200  # characters of another package's message


class _UnusableError(Exception):
    """Its message goes on after the package's name; its cause is what the package raised."""


def require(
    module: str,
    what: str,
    *,
    needs: Sequence[str] = (),
    error: type[KvedgeError] = MissingExtraError,
) -> Any:
    """Import an optional package.

    Parameters
    ----------
    module : str
        A key of :data:`PACKAGES`.
    what : str
        Subject and verb of the error's message, such as ``"chat templates need"``.
    needs : sequence of str
        Names in it that must be there too.
    error : type
        What to raise; by default MissingExtraError.

    Returns
    -------
    module

    Raises
    ------
    KvedgeError
        It is not installed, too old, or cannot be imported; the reason is its cause.
    """
    try:
        return _load(module, needs)
    except _UnusableError as reason:
        text = f"{what} {PACKAGES[module].name}, which {reason}"
        raise error(text) from reason.__cause__


def obstacle(module: str, needs: Sequence[str] = ()) -> str | None:
    """Return why an optional package cannot be used, in one line; None if it can.

    Parameters
    ----------
    module, needs
        As of :func:`require`.

    Returns
    -------
    str or None
    """
    try:
        _load(module, needs)
    except _UnusableError as reason:
        return f"{PACKAGES[module].name} {reason}"
    return None


def version(module: str) -> str:
    """Return the version of a package: its own word for it, else what pip knows.

    Parameters
    ----------
    module : str
        A key of :data:`PACKAGES`.

    Returns
    -------
    str
        As :func:`installed_version` where it does not say.
    """
    told = getattr(importlib.import_module(module), "__version__", None)
    return told if isinstance(told, str) else installed_version(module)


def installed_version(module: str) -> str:
    """Return the version of a package that pip knows; nothing is imported.

    Parameters
    ----------
    module : str
        A key of :data:`PACKAGES`.

    Returns
    -------
    str
        "of unknown version" where it does not know.
    """
    try:
        return importlib.metadata.version(PACKAGES[module].name)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def is_installed(module: str) -> bool:
    """Whether Python finds a module: a folder of its name alone is none.

    Parameters
    ----------
    module : str

    Returns
    -------
    bool
        Whether it can be imported is another question.
    """
    try:
        spec = importlib.util.find_spec(module)
    except ValueError:  # it is there without a spec, or None stands in its place
        return sys.modules.get(module) is not None
    except Exception:
        return True  # what finds modules fails for it: importing says why
    return spec is not None and spec.origin is not None


def _load(module: str, needs: Sequence[str]) -> Any:
    package = PACKAGES[module]
    if not is_installed(module):
        raise _UnusableError(f"is not installed: {package.install}")
    try:
        loaded = importlib.import_module(module)
        lacking = next((name for name in (*package.needs, *needs) if not _has(loaded, name)), None)
    except MemoryError:
        raise
    # Of any kind: libraries that are not found or too new for the processor, versions that do not
    # fit together, and whatever else a package makes of them. Some leave the process.
    except (Exception, SystemExit) as error:
        reason = f"is installed but cannot be imported ({_in_one_line(error)})"
        raise _UnusableError(reason) from error
    upgrade = package.install.replace("install", "install --upgrade", 1)
    if package.minimum and _release(version(module)) < package.minimum:
        told = f"{version(module)}; {'.'.join(map(str, package.minimum))} or later is needed"
        raise _UnusableError(f"is too old ({told}): {upgrade}")
    if lacking is not None:
        told = f"{version(module)} has no {lacking}"
        reason = f"is too old or something else of that name ({told})"
        raise _UnusableError(f"{reason}: {upgrade}") from AttributeError(lacking)
    return loaded


def _has(place: Any, name: str) -> bool:
    """Whether a dotted name leads from a module to something."""
    for part in name.split("."):
        if not hasattr(place, part):  # which may import: then it raises as that does
            submodule = f"{getattr(place, '__name__', '')}.{part}"
            try:
                importlib.import_module(submodule)
            except ModuleNotFoundError as error:
                if error.name in (submodule, getattr(place, "__name__", "")):
                    return False
                raise
        place = getattr(place, part)
    return True


def _in_one_line(error: BaseException) -> str:
    """Class and first line of an error."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:_LONGEST_REASON]}".rstrip(": ")


def _release(told: str) -> tuple[int, ...]:
    """Numbers that a version begins with; none, which is the oldest, where it has none."""
    found = re.match(r"\d+(?:\.\d+)*", told)
    return tuple(map(int, found[0].split("."))) if found else ()
