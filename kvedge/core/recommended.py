"""How keys and values are stored where nobody says: docs/formats.md has the measurements."""

from __future__ import annotations

from typing import Any

__all__ = ["AUTO", "RECOMMENDED"]

AUTO = "auto"  # what the command line calls it

#: Arguments of a KVCache. A few large key channels, as Qwen2.5 has, cost plain int8 much; the
#: scale costs models without them nothing.
RECOMMENDED: dict[str, Any] = {"dtype": "int8", "key_scale": "auto"}
