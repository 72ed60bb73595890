"""The tokenizer and the chat template of a GGUF file."""

from __future__ import annotations

import re
from typing import NamedTuple

from ..errors import CorruptFileError, InvalidArgumentError, UnsupportedModelError
from .byte_level_bpe import ByteLevelBpeTokenizer
from .chat_template import ChatTemplate
from .gguf_reader import GgufFile
from .tokenizer import SPACE_SIGN, ScoredBpeTokenizer, Tokenizer

__all__ = ["read_tokenizer"]

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5  # gguf.TokenType, without needing gguf

# Tokens that end a turn or a text, by their text: files often name one of them only, in
# eos_token_id, and type others as plain text. llama.cpp looks for them likewise.
_ENDS = frozenset(
    {
        *("</s>", "<eos>", "[EOS]", "<|endoftext|>", "<|end_of_text|>", "<|endofprompt|>"),
        *("<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>", "<EOT>", "_<EOT>", "<|EOT|>", "[EOT]"),
        *("<|im_end|>", "<|end|>", "<end_of_turn>", "<turn|>", "<end_of_utterance>"),
        *("<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<|tool_response>"),
        *("<|END_OF_TURN_TOKEN|>", "<|endofturn|>", "[|endofturn|]", "<|end_of_turn|>"),
        "<\uff5cend\u2581of\u2581sentence\uff5c>",  # DeepSeek
    }
)
# Beside all of these tokens the first ends no turn: it ends one of a turn's messages, or is HTML's.
_NO_ENDS = (
    ("<|end|>", ("<|return|>", "<|call|>")),
    ("<|end|>", ("<|calls|>", "<|flush|>")),
    ("</s>", ("<|tool_response>",)),
)
_TAG = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")  # such as <s>, [INST]; no word of a text


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
    tokens = file.get_list("tokenizer.ggml.tokens", str)
    try:
        if kind == "gpt2":
            tokenizer: Tokenizer = _byte_level_bpe(file, tokens, split)
        else:
            tokenizer = _scored_bpe(file, tokens)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{file.path}: {error}") from error
    except InvalidArgumentError as error:  # an id outside the vocabulary, a score of NaN ...
        raise CorruptFileError(f"{file.path}: {error}") from error
    tokenizer.chat_template = _chat_template(file, tokens)
    return tokenizer


def _chat_template(file: GgufFile, tokens: list[str]) -> ChatTemplate | None:
    source = file.get("tokenizer.chat_template", str, None)
    if source is None:
        return None
    ids = (file.get(f"tokenizer.ggml.{name}_token_id", int, None) for name in ("bos", "eos"))
    bos, eos = ("" if id is None else tokens[id] for id in ids)
    return ChatTemplate(source, bos, eos)


def _scored_bpe(file: GgufFile, tokens: list[str]) -> ScoredBpeTokenizer:
    bos_id = file.get("tokenizer.ggml.bos_token_id", int, 1)
    roles = _roles(file, tokens)
    return ScoredBpeTokenizer(
        [token.replace(SPACE_SIGN, " ").encode() for token in tokens],
        file.get_list("tokenizer.ggml.scores", float),
        bos_id=bos_id,
        stop_ids=roles.stop or {bos_id, 2},
        special_ids=roles.special,
        spelled_ids=roles.spelled,
        unknown_id=file.get("tokenizer.ggml.unknown_token_id", int, 0),
        add_bos=file.get("tokenizer.ggml.add_bos_token", bool, True),
        add_space_prefix=file.get("tokenizer.ggml.add_space_prefix", bool, True),
    )


def _byte_level_bpe(file: GgufFile, tokens: list[str], split: str) -> ByteLevelBpeTokenizer:
    roles = _roles(file, tokens)
    return ByteLevelBpeTokenizer(
        tokens,
        file.get_list("tokenizer.ggml.merges", str),
        split=split,
        bos_id=file.get("tokenizer.ggml.bos_token_id", int, None),
        stop_ids=roles.stop,
        special_ids=roles.special,
        spelled_ids=roles.spelled,
        add_bos=file.get("tokenizer.ggml.add_bos_token", bool, None),
    )


class _Roles(NamedTuple):
    """Ids of tokens that are more than text."""

    stop: set[int]  # end a turn or a text
    special: set[int]  # have no text of their own
    spelled: set[int]  # are recognised where a text spells them out


def _roles(file: GgufFile, tokens: list[str]) -> _Roles:
    """What tokens do, by the ids that the file names, their types, and well-known texts.

    BOS is among those that end a text: it separates texts in training. A tag of a turn or a text
    that the file types as plain text, or not at all, is a control token all the same.
    """
    keys = (f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos", "eot", "eom"))
    named = {token for key in keys if (token := file.get(key, int, None)) is not None}
    ends = {text: token for token, text in enumerate(tokens) if text in _ENDS}
    for text, others in _NO_ENDS:
        if ends.keys() >= {text, *others}:
            del ends[text]
    known = named.intersection(range(len(tokens)))
    tags = {token for token in known if _TAG.fullmatch(tokens[token])}
    user_defined = set(_ids_of_type(file, _USER_DEFINED))
    control = set(_ids_of_type(file, _CONTROL)) | (tags | set(ends.values())) - user_defined
    return _Roles(
        stop=named | set(ends.values()),
        special=control | set(_ids_of_type(file, _UNKNOWN, _UNUSED)),
        spelled=control | user_defined,
    )


def _ids_of_type(file: GgufFile, *types: int) -> list[int]:
    if not file.has("tokenizer.ggml.token_type"):
        return []
    stored = file.get_list("tokenizer.ggml.token_type", int)
    return [token for token, kind in enumerate(stored) if kind in types]
