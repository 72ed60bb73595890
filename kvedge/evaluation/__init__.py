"""What a storage format costs a model: perplexity and KL to a float32 cache, on a text.

:mod:`.choice` names a configuration of the cache, :mod:`.subject` is the model that reads the text,
:mod:`.measure` compares what it predicts on each cache, :mod:`.recall` what it recalls of a text,
:mod:`.plot` draws.

>>> from kvedge.data import STORIES_MODEL
>>> from kvedge.evaluation import LlamaSubject, evaluate, parse_choices
>>> from kvedge.llama import LlamaModel
>>> model = LlamaModel.from_file(STORIES_MODEL)
>>> tokens = model.tokenizer.encode("Once upon a time, there was a big dog named Max.")
>>> float32, int8 = evaluate(LlamaSubject(model), tokens, parse_choices(["int8"]))
>>> int8.kl.mean < 0.01
True
"""

from .choice import FLOAT32, CacheChoice, default_choices, parse_choices
from .measure import Estimate, Positions, Result, evaluate
from .recall import Recall, recall
from .subject import LlamaSubject, Reader, Subject

__all__ = [
    "FLOAT32",
    "CacheChoice",
    "Estimate",
    "LlamaSubject",
    "Positions",
    "Reader",
    "Recall",
    "Result",
    "Subject",
    "default_choices",
    "evaluate",
    "parse_choices",
    "recall",
]
