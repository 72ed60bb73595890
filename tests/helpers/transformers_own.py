"""A pytest plugin: transformers' own tests get a KvedgeCache where they would get a DynamicCache.

    make test-transformers-own CHECKOUT=../transformers

Storage is float32, so that results are to be the same. Models keep the attention they were made
with, and KVEDGE_OWN_ATTENTION=1 gives them kvedge's. What KvedgeCache refuses, and caches that are
made without a config, stay transformers' own.
"""

import os

import transformers
from transformers import cache_utils
from transformers.generation import utils as generation_utils

from kvedge.errors import KvedgeError
from kvedge.transformers import KvedgeCache

_Own = cache_utils.DynamicCache
made = 0  # KvedgeCaches


class _Kind(type(_Own)):
    def __instancecheck__(cls, instance):
        return isinstance(instance, (_Own, KvedgeCache))


class DynamicCache(_Own, metaclass=_Kind):
    """Stands for transformers' class; an instance is one of ours, or of the class itself."""

    def __new__(cls, ddp_cache_data=None, config=None, **options):
        """Make one of ours where there is a config, and nothing else."""
        global made
        if config is not None and ddp_cache_data is None and not options:
            try:
                cache = KvedgeCache(config, "float32")
            except KvedgeError:
                pass
            else:
                made += 1
                return cache
        return _Own(ddp_cache_data, config, **options)


def pytest_configure(config):
    """Take the place of the class, and of the attention if that is asked for."""
    for module in (transformers, cache_utils, generation_utils):
        module.DynamicCache = DynamicCache
    if os.environ.get("KVEDGE_OWN_ATTENTION") == "1":
        functions = transformers.AttentionInterface._global_mapping
        masks = transformers.AttentionMaskInterface._global_mapping
        functions["sdpa"], masks["sdpa"] = functions["kvedge"], masks["kvedge"]


def pytest_terminal_summary(terminalreporter):
    """Say how many of the caches were ours."""
    terminalreporter.line(f"{made} KvedgeCaches were made")
