"""A configuration of the cache by name: ``int8:group_size=32,key_offset=auto``, ``policy.json``."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, cast

from .. import KVCache
from ..core.formats import DTYPES, FORMATS
from ..core.recommended import RECOMMENDED, by_name
from ..core.types import Dtype
from ..errors import InvalidArgumentError
from ..eviction import Eviction
from ..layer_policy import LayerPolicy

__all__ = ["FLOAT32", "CacheChoice", "default_choices", "parse_choices"]

# Arguments of KVCache that are the model's or the evaluation's business.
_NOT_A_CHOICE = (
    "num_layers",
    "num_kv_heads",
    "head_dim",
    "value_head_dim",
    "dtype",
    "max_seq_len",
)
_EVICTION = "eviction_"  # before the names of Eviction's options
_STATES = "state_dtype"  # an argument of KvedgeCache
_ATTENTION = ("precision_bits",)  # arguments of attend(), not of the cache

# What is compared unless asked otherwise, beside what is recommended and every format as it is.
_VARIANTS = (
    "int8:group_size=32",
    "int8:scale_dtype=float16",
    "int8:key_scale=auto",
    "int8:key_offset=auto",
    "int8:precision_bits=8",
    "fp8_e4m3:key_scale=auto",
)


@dataclass(frozen=True)
class CacheChoice:
    """A storage format and its options; made by :func:`parse_choices`."""

    name: str  # as it was given
    dtype: Dtype  # of a policy its first layer's
    # further arguments of KVCache, or a LayerPolicy as "policy"
    cache_options: dict[str, Any] = field(default_factory=dict)
    attention_options: dict[str, Any] = field(default_factory=dict)  # arguments of attend()


FLOAT32 = CacheChoice("float32", "float32")


def parse_choices(texts: Iterable[str]) -> list[CacheChoice]:
    """Return the configurations that texts name, in their order, each once.

    Parameters
    ----------
    texts : iterable of str
        Each names one or more configurations with commas between: a format, or ``auto`` or
        ``small`` for what is recommended, then perhaps a colon and options:
        ``"float16,int8:group_size=32,key_offset=auto,bfloat16"``. A part with ``=`` and without
        ``:`` is a further option of the format before it. Options are arguments of
        :class:`kvedge.KVCache`, and ``precision_bits`` of its ``attend``;
        ``eviction=snapkv,eviction_tokens=512`` are those of :class:`kvedge.Eviction`;
        ``state_dtype=bfloat16`` is for models of transformers with states. Or the file of a
        :class:`kvedge.LayerPolicy`, whose name ends with ``.json``; of options it takes those of
        ``attend``.

    Returns
    -------
    list of CacheChoice

    Raises
    ------
    InvalidArgumentError
        For a format or an option that does not exist. Whether a value suits its option, the cache
        decides.
    CorruptFileError, OSError
        A policy's file cannot be read.
    """
    found: dict[str, CacheChoice] = {}
    for text in texts:
        for name in _names(text):
            found.setdefault(name, _parse(name))
    return list(found.values())


def default_choices(head_dim: int) -> list[CacheChoice]:
    """Return what is recommended, every format, and options where they differ for this head_dim."""
    choices = parse_choices([*RECOMMENDED, *FORMATS, *_VARIANTS])
    return [choice for choice in choices if choice.cache_options.get("group_size", 0) < head_dim]


def _names(text: str) -> Sequence[str]:
    """Split at the commas that do not stand between two options of one format."""
    names: list[str] = []
    for part in text.split(","):
        if names and "=" in part and ":" not in part:
            names[-1] += f",{part.strip()}"
        else:
            names.append(part.strip())
    return names


def _parse(name: str) -> CacheChoice:
    dtype, _, rest = name.partition(":")
    options: dict[str, Any] = {}
    if dtype.endswith(".json"):
        policy = LayerPolicy.load(dtype)
        options = {"policy": policy}
        dtype = by_name(policy.layers[0])["dtype"]
    if dtype not in (*RECOMMENDED, *DTYPES):
        wanted = ", ".join((*RECOMMENDED, *DTYPES))
        raise InvalidArgumentError(f"{name!r}: no format {dtype!r}, only {wanted}")
    known = [] if "policy" in options else _cache_options()
    evicting = ["eviction", *(_EVICTION + field.name for field in fields(Eviction)[1:])]
    eviction: dict[str, Any] = {}
    attention: dict[str, Any] = {}
    for option in rest.split(",") if rest else ():
        key, equals, value = option.partition("=")
        if key not in (*known, *evicting, *_ATTENTION) or not equals:
            wanted = "=, ".join((*known, *evicting, *_ATTENTION))
            raise InvalidArgumentError(f"{name!r}: no option {option!r}, only {wanted}=")
        if key in evicting:
            eviction[key.removeprefix(_EVICTION)] = _value(value)
            continue
        (attention if key in _ATTENTION else options)[key] = _value(value)
    if eviction:
        if "eviction" not in eviction:
            raise InvalidArgumentError(f"{name!r}: {_EVICTION}... needs eviction=METHOD")
        eviction["method"] = eviction.pop("eviction")
        options["eviction"] = Eviction.of(eviction)
    options = by_name({"dtype": dtype, **options})
    return CacheChoice(name, cast(Dtype, options.pop("dtype")), options, attention)


def _cache_options() -> list[str]:
    parameters = inspect.signature(KVCache).parameters
    return [name for name in parameters if name not in _NOT_A_CHOICE] + [_STATES]


def _value(text: str) -> Any:
    """Return a number, True, False or None where the text is one, else the text."""
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            pass
    return text
