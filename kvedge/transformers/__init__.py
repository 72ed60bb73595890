"""Models of Hugging Face transformers on kvedge's bytes: :class:`KvedgeCache`.

Importing this package registers ``attn_implementation="kvedge"``:

    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="kvedge")
    model.generate(**inputs, past_key_values=KvedgeCache(model.config))

Newer versions of transformers call the argument `cache`: :func:`cache_argument` tells.
"""

from kvedge.transformers._installed import cache_argument, require

require()

from kvedge.transformers.acceleration import Acceleration, accelerate  # noqa: E402
from kvedge.transformers.attention import register  # noqa: E402
from kvedge.transformers.cache import KvedgeCache  # noqa: E402
from kvedge.transformers.drafts import enable_drafts  # noqa: E402

register()

__all__ = ["Acceleration", "KvedgeCache", "accelerate", "cache_argument", "enable_drafts"]
