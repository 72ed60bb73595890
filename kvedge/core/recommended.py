"""Names of recommended storage, which stand wherever a dtype does: docs/formats.md measures them.

A name is a dtype and options beside it. Options that are given replace the name's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

__all__ = ["AUTO", "IN_ROWS", "RECOMMENDED", "Recommended", "by_name"]

Recommended: TypeAlias = Literal["auto", "small"]
AUTO: Recommended = "auto"

#: Options of a KVCache by name. Keys have steps for each channel, taken anew every 32 tokens: a few
#: large channels, as Qwen2.5 has, cost the others nothing, and a long context no more than a short
#: one. "small" takes about half of the bytes of "auto".
RECOMMENDED: dict[str, dict[str, Any]] = {
    "auto": {
        "dtype": "kivi8",
        "value_dtype": "int8",
        "value_rotation": True,
        "recent": 64,
        "sinks": 4,
    },
    "small": {"dtype": "kivi4", "recent": 96, "sinks": 4},
}

#: The same where keys cannot be in runs: over a factor for each channel.
IN_ROWS: dict[str, dict[str, Any]] = {
    "auto": {"dtype": "int8", "key_scale": AUTO},
    "small": {"dtype": "int4", "scale_dtype": "float16", "key_scale": AUTO},
}


def by_name(options: Mapping[str, Any], *, over_ranks: bool = False) -> dict[str, Any]:
    """Options of storage, with those that a name in ``dtype`` sets where they are None or missing.

    Keys are in rows where they get an offset or a scale, which runs do not have. `over_ranks`:
    nothing is in runs, or in another format besides. Values that get a format are in that alone,
    keys that get one have an automatic scale. Layers with a window have no sinks.
    """
    name = options.get("dtype")
    if not isinstance(name, str) or name not in RECOMMENDED:
        return dict(options)
    best, scale = dict(RECOMMENDED[name]), options.get("key_scale")
    has_vectors = options.get("key_offset") is not None or not isinstance(scale, str | None)
    if over_ranks or has_vectors:
        parts = () if over_ranks else ("recent", "sinks")
        best = IN_ROWS[name] | {option: best[option] for option in parts}
    if options.get("key_dtype") is not None:
        best["key_scale"] = AUTO
    if options.get("value_dtype") is not None:
        best.pop("value_rotation", None)
    if options.get("window") is not None:
        best.pop("sinks", None)
    for option, value in options.items():
        if option != "dtype" and (value is not None or option == "key_scale"):
            best[option] = value
    return best
