"""The model that a command runs: given by options, or the one that comes with kvedge."""

from __future__ import annotations

import argparse
import warnings
from typing import TYPE_CHECKING, Any

from kvedge.console.exits import UsageError
from kvedge.console.output import Output

if TYPE_CHECKING:
    from kvedge.llama import LlamaModel

__all__ = ["add_model_options", "load_model"]


def add_model_options(parser: argparse.ArgumentParser) -> Any:
    """Declare ``--model`` and ``--tokenizer``; return their group."""
    group = parser.add_argument_group("model")
    group.add_argument("-m", "--model", metavar="FILE", help="llama2.c checkpoint or GGUF file")
    group.add_argument(
        "--tokenizer",
        metavar="FILE",
        help="llama2.c tokenizer.bin (default: in the GGUF file, or beside the checkpoint)",
    )
    return group


def load_model(options: argparse.Namespace, output: Output) -> tuple[str, LlamaModel]:
    """Return the model's path and the model, which has a tokenizer.

    Raises
    ------
    UsageError
        If there is no tokenizer for the model, or no model for the tokenizer.
    CorruptFileError, InvalidArgumentError, MissingExtraError, OSError
        As :meth:`kvedge.llama.LlamaModel.from_file`.
    """
    if options.tokenizer is not None and options.model is None:
        raise UsageError("--tokenizer needs --model: the built-in model has its own")
    path, tokenizer = options.model, options.tokenizer
    if path is None:
        from kvedge.data import STORIES_MODEL, STORIES_TOKENIZER

        path, tokenizer = str(STORIES_MODEL), str(STORIES_TOKENIZER)
    from kvedge.llama import LlamaModel  # here: `kvedge plan --layers ...` needs no model code

    with warnings.catch_warnings(record=True) as remarks, output.status("loading the model"):
        warnings.simplefilter("always", UserWarning)
        model = LlamaModel.from_file(path, tokenizer)
    for remark in remarks:
        output.note(f"note: {remark.message}")
    if model.tokenizer is None:
        raise UsageError(f"there is no tokenizer beside {path}: give one with --tokenizer FILE")
    return path, model
