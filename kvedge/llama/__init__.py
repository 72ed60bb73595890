"""A small Llama runtime in plain NumPy, in the manner of llama2.c, on kvedge's caches.

It is meant to be read: :mod:`.model` is the forward pass in the order of the paper,
:mod:`.generate` the loop around it. Models come from llama2.c checkpoints, or from GGUF files with
the extra ``kvedge[gguf]``.

>>> from kvedge.llama import LlamaModel, generate
>>> from kvedge.data import STORIES_MODEL
>>> model = LlamaModel.from_file(STORIES_MODEL)
>>> text = generate(model, prompt="Once upon a time", max_tokens=8)
>>> "".join(piece.text for piece in text)
', there was a little girl'
"""

from .chat_template import ChatTemplate
from .checkpoint import load_checkpoint
from .config import LlamaConfig, rope_frequencies
from .generate import Generation, Piece, generate, shift_context
from .gguf_file import load_gguf
from .key_bias import with_key_bias
from .model import LlamaModel, read_config
from .sampling import Sampler
from .tokenizer import ScoredBpeTokenizer, Tokenizer, load_llama2c_tokenizer
from .weights import LayerWeights, LlamaWeights

__all__ = [
    "ChatTemplate",
    "Generation",
    "LayerWeights",
    "LlamaConfig",
    "LlamaModel",
    "LlamaWeights",
    "Piece",
    "Sampler",
    "ScoredBpeTokenizer",
    "Tokenizer",
    "generate",
    "load_checkpoint",
    "load_gguf",
    "load_llama2c_tokenizer",
    "read_config",
    "rope_frequencies",
    "shift_context",
    "with_key_bias",
]
