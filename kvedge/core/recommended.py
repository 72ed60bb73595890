"""How keys and values are stored where nobody says: docs/formats.md has the measurements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["AUTO", "RECOMMENDED", "recommended"]

AUTO = "auto"  # what the command line calls it

#: Arguments of a KVCache. Keys have steps for each channel, taken anew every 32 tokens: a few large
#: channels, as Qwen2.5 has, cost the others nothing, and a long context no more than a short one.
RECOMMENDED: dict[str, Any] = {"dtype": "kivi8", "value_dtype": "int8", "value_rotation": True}

#: The same where tokens cannot be in runs: keys over a factor for each channel.
IN_ROWS: dict[str, Any] = {"dtype": "int8", "key_scale": AUTO}


def recommended(given: Mapping[str, Any], *, in_rows: bool = False) -> dict[str, Any]:
    """The options of storage that are given, without ``dtype``, and what is recommended beside.

    Keys are in rows where `in_rows` says so, and where they get an offset or a scale, which runs do
    not have. Values that get a format are in that alone.
    """
    scale = given.get("key_scale")
    has_vectors = given.get("key_offset") is not None or not isinstance(scale, str | None)
    if in_rows or has_vectors:
        return {**IN_ROWS, **given}
    best = {**RECOMMENDED, "key_scale": AUTO}  # of keys that get a format
    if given.get("value_dtype") is not None:
        del best["value_rotation"]
    said = {name: one for name, one in given.items() if one is not None or name == "key_scale"}
    return best | said
