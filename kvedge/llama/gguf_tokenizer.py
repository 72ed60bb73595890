"""The tokenizer and the chat template of a GGUF file."""

from __future__ import annotations

from ..errors import CorruptFileError, InvalidArgumentError, UnsupportedModelError
from .byte_level_bpe import TEXT_SPLITS, ByteLevelBpeTokenizer
from .chat_template import ChatTemplate
from .gguf_reader import GgufFile
from .tokenizer import SPACE_SIGN, ScoredBpeTokenizer, Tokenizer

__all__ = ["read_tokenizer"]

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5  # gguf.TokenType, without needing gguf

# Tokens that end a turn or a text, by their text: files often name one of them only, in
# eos_token_id, and llama.cpp looks for them likewise.
_ENDS = frozenset(
    {
        *("</s>", "<eos>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"),
        *("<|im_end|>", "<|end|>", "<end_of_turn>", "<EOT>", "<|endofprompt|>"),
    }
)


def read_tokenizer(file: GgufFile) -> Tokenizer:
    """The file's tokenizer, with its chat template if it has one.

    Raises
    ------
    CorruptFileError
    UnsupportedModelError
        Of a kind that this runtime lacks.
    MissingExtraError
        A byte-level tokenizer, without the package tokenizers.
    """
    kind = file.get("tokenizer.ggml.model", str)
    if kind not in ("llama", "gpt2"):
        raise UnsupportedModelError(
            f"{file.path}: tokenizer {kind!r} is not supported, expected 'llama' or 'gpt2'"
        )
    split = file.get("tokenizer.ggml.pre", str, "default")
    if kind == "gpt2" and split not in TEXT_SPLITS:
        raise UnsupportedModelError(
            f"{file.path}: text splitting {split!r} is not supported, expected one of "
            f"{', '.join(TEXT_SPLITS)}"
        )
    tokens = file.get_list("tokenizer.ggml.tokens", str)
    try:
        if kind == "gpt2":
            made: Tokenizer = _byte_level_bpe(file, tokens, split)
        else:
            made = _scored_bpe(file, tokens)
    except InvalidArgumentError as error:  # an id outside the vocabulary, a score of NaN ...
        raise CorruptFileError(f"{file.path}: {error}") from error
    made.chat_template = _chat_template(file, tokens)
    return made


def _chat_template(file: GgufFile, tokens: list[str]) -> ChatTemplate | None:
    source = file.get("tokenizer.chat_template", str, None)
    if source is None:
        return None
    ids = (file.get(f"tokenizer.ggml.{name}_token_id", int, None) for name in ("bos", "eos"))
    bos, eos = ("" if id is None else tokens[id] for id in ids)
    return ChatTemplate(source, bos, eos)


def _scored_bpe(file: GgufFile, tokens: list[str]) -> ScoredBpeTokenizer:
    bos_id = file.get("tokenizer.ggml.bos_token_id", int, 1)
    return ScoredBpeTokenizer(
        [token.replace(SPACE_SIGN, " ").encode() for token in tokens],
        file.get_list("tokenizer.ggml.scores", float),
        bos_id=bos_id,
        stop_ids=_stop_ids(file, tokens) or {bos_id, 2},
        special_ids=_ids_of_type(file, _UNKNOWN, _CONTROL, _UNUSED),
        spelled_ids=_ids_of_type(file, _CONTROL, _USER_DEFINED),
        unknown_id=file.get("tokenizer.ggml.unknown_token_id", int, 0),
        add_bos=file.get("tokenizer.ggml.add_bos_token", bool, True),
        add_space_prefix=file.get("tokenizer.ggml.add_space_prefix", bool, True),
    )


def _byte_level_bpe(file: GgufFile, tokens: list[str], split: str) -> ByteLevelBpeTokenizer:
    return ByteLevelBpeTokenizer(
        tokens,
        file.get_list("tokenizer.ggml.merges", str),
        split=split,
        bos_id=file.get("tokenizer.ggml.bos_token_id", int, None),
        stop_ids=_stop_ids(file, tokens),
        special_ids=_ids_of_type(file, _UNKNOWN, _CONTROL, _UNUSED),
        spelled_ids=_ids_of_type(file, _CONTROL, _USER_DEFINED),
        add_bos=file.get("tokenizer.ggml.add_bos_token", bool, None),
    )


def _stop_ids(file: GgufFile, tokens: list[str]) -> set[int]:
    """BOS, which separates texts in training, and every token that ends one."""
    keys = (f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos", "eot", "eom"))
    named = {file.get(key, int, None) for key in keys} - {None}
    marks = set(_ids_of_type(file, _CONTROL, _USER_DEFINED))
    return named | {token for token in marks if token < len(tokens) and tokens[token] in _ENDS}


def _ids_of_type(file: GgufFile, *types: int) -> list[int]:
    if not file.has("tokenizer.ggml.token_type"):
        return []
    stored = file.get_list("tokenizer.ggml.token_type", int)
    return [token for token, kind in enumerate(stored) if kind in types]
