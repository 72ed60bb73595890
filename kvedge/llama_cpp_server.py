"""llama-cpp-python's server, its prompts in a prefix store.

::

    python -m kvedge.llama_cpp_server --prompt-store DIR --model model.gguf --n_ctx 8192

All other options are the server's own.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
from typing import Any

from kvedge.console.exits import USAGE
from kvedge.console.sizes import add_store_size
from kvedge.core import packages
from kvedge.errors import KvedgeError
from kvedge.llama_cpp import PrefixCache
from kvedge.store.prefix_store import PrefixStore

__all__ = ["main"]


def main() -> None:
    """Run the server; the store is the cache of each model that it loads, but of images."""
    parser = argparse.ArgumentParser(
        prog="python -m kvedge.llama_cpp_server",
        description="llama-cpp-python's server, whose prompts are found again after a restart. "
        "All other options are those of python -m llama_cpp.server.",
        allow_abbrev=False,
    )
    parser.add_argument("--prompt-store", metavar="DIR", required=True, help="a folder")
    add_store_size(parser)
    parser.add_argument(
        "--namespace", metavar="TEXT", default="", help="a tenant, in whose name it is used"
    )
    options, others = parser.parse_known_args()
    try:
        packages.require("llama_cpp", "the server needs")
        store = PrefixStore(options.prompt_store, max_bytes=options.prompt_store_size)
    except (KvedgeError, OSError) as error:
        print(f"kvedge: {error}", file=sys.stderr)
        sys.exit(USAGE)
    logging.basicConfig(format="%(name)s: %(message)s")
    logging.getLogger("kvedge").setLevel(logging.INFO)

    proxy = importlib.import_module("llama_cpp.server.model").LlamaProxy
    load = proxy.load_llama_from_model_settings

    def load_with_store(settings: Any) -> Any:
        llm = load(settings)
        if llm.chat_handler is None:  # else ids do not say which image they stand for
            llm.set_cache(PrefixCache(llm, store, namespace=options.namespace))
        return llm

    proxy.load_llama_from_model_settings = staticmethod(load_with_store)
    sys.argv = [sys.argv[0], *others]
    importlib.import_module("llama_cpp.server.__main__").main()


if __name__ == "__main__":
    main()
