"""GPT-2's byte-level byte pair encoding, by the package ``tokenizers`` (an extra)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np

from ..core.packages import require
from ..errors import InvalidArgumentError
from .chat_template import ChatTemplate
from .text_splits import text_split
from .tokenizer import WithControlTexts

__all__ = ["ByteLevelBpeTokenizer"]


class ByteLevelBpeTokenizer(WithControlTexts):
    """Byte pair encoding over bytes written as printable characters (Radford et al. 2019).

    Parameters
    ----------
    tokens : sequence of str
        The vocabulary, in GPT-2's alphabet of 256 characters for the 256 bytes.
    merges : sequence of str
        Pairs to join, the first ones first, each as ``"left right"``.
    split : str
        The way a text is cut into words, by GGUF's name: see :mod:`.text_splits`.
    bos_id : int or None
        Token that begins a sequence.
    stop_ids : collection of int
        Tokens that end one.
    special_ids : collection of int
        Tokens without text of their own (control, unknown).
    spelled_ids : collection of int
        Tokens recognised where a text spells them out, such as ``<|im_start|>``.
    add_bos : bool, optional
        What `encode` does when not told. None: as goes with `split` (Llama 3 begins with BOS).

    Raises
    ------
    InvalidArgumentError
        For an id outside the vocabulary, or a vocabulary that the merges do not fit.
    UnsupportedModelError
        For a `split` that is not known.
    MissingExtraError
        If the package ``tokenizers`` is absent.
    """

    def __init__(
        self,
        tokens: Sequence[str],
        merges: Sequence[str],
        *,
        split: str = "default",
        bos_id: int | None = None,
        stop_ids: Collection[int] = (),
        special_ids: Collection[int] = (),
        spelled_ids: Collection[int] = (),
        add_bos: bool | None = None,
    ) -> None:
        tokenizers = require("tokenizers", "this model's byte-level tokenizer needs")
        way = text_split(split)
        self.vocab_size = len(tokens)
        for token in (*stop_ids, *special_ids, *spelled_ids, *([] if bos_id is None else [bos_id])):
            self._check(token)
        self.chat_template: ChatTemplate | None = None
        self.bos_id = bos_id
        self.stop_ids = frozenset(stop_ids)
        self.add_bos = bos_id is not None and (way.add_bos if add_bos is None else add_bos)
        texts = [text.encode("utf-8", "surrogatepass") for text in tokens]
        self._texts = b"".join(texts)  # a Python object per token would take ten times as much
        self._ends = np.cumsum([0, *map(len, texts)])
        del texts
        self._special = frozenset(special_ids)

        pre = tokenizers.pre_tokenizers
        steps: list[Any] = [
            pre.Split(tokenizers.Regex(pattern), behavior="isolated") for pattern in way.patterns
        ]
        steps.append(pre.ByteLevel(add_prefix_space=False, use_regex=False))
        vocab = {text: token for token, text in enumerate(tokens)}
        pairs: Any = [tuple(merge.split(" ")) for merge in merges]
        try:
            model = tokenizers.models.BPE(
                vocab=vocab, merges=pairs, ignore_merges=way.ignore_merges
            )
        except Exception as error:  # the library raises plain Exception
            raise InvalidArgumentError(f"the merges do not fit the vocabulary: {error}") from error
        self._spelled = {tokens[token]: token for token in sorted(spelled_ids)}
        self._controls = self._special | self.stop_ids

        def encoder(spelled: Collection[str]) -> Any:
            tokenizer = tokenizers.Tokenizer(model)
            tokenizer.pre_tokenizer = pre.Sequence(steps)
            tokenizer.add_special_tokens(  # they keep the ids they have in the vocabulary
                [tokenizers.AddedToken(text, special=True) for text in spelled]
            )
            return tokenizer

        self._encoder = encoder
        self._bpe = encoder(self._spelled)
        self._plain: tuple[frozenset[str], Any] | None = None  # without these control texts

        # GPT-2's alphabet: printable bytes stand for themselves, the others for the characters
        # from U+0100 on, in order
        alphabet = sorted(pre.ByteLevel.alphabet())
        itself = {ord(char) for char in alphabet if ord(char) < 256}
        others = (byte for byte in range(256) if byte not in itself)
        self._byte_of = {char: ord(char) if ord(char) < 256 else next(others) for char in alphabet}

    def __repr__(self) -> str:
        return f"ByteLevelBpeTokenizer(vocab_size={self.vocab_size}, bos_id={self.bos_id})"

    def encode(
        self,
        text: str,
        *,
        bos: bool | None = None,
        space_prefix: bool | None = None,
        special: bool = True,
    ) -> list[int]:
        """Tokens of a text.

        Parameters
        ----------
        text : str
            Any text.
        bos : bool, optional
            Begin with the BOS token. None: as the model was trained.
        space_prefix : bool, optional
            Of no effect: byte-level tokenizers put no space in front.
        special : bool
            Control tokens that the text spells out, such as ``<|im_end|>``, become these tokens;
            False: they are text as any other. Say False for what others wrote.

        Returns
        -------
        list of int

        Raises
        ------
        InvalidArgumentError
            If `text` is not a string or holds half of a surrogate pair, or `bos` is asked for and
            the model has none.
        """
        if not isinstance(text, str):
            raise InvalidArgumentError(f"text must be str, got {type(text).__name__}")
        bos = self.add_bos if bos is None else bos
        if bos and self.bos_id is None:
            raise InvalidArgumentError("this model has no BOS token")
        try:
            ids: list[int] = self._bpe.encode(text).ids if special else self._as_text(text)
        except (UnicodeError, TypeError) as error:
            at = next((i for i, char in enumerate(text) if "\ud800" <= char <= "\udfff"), None)
            if at is None:
                raise
            raise InvalidArgumentError(
                f"text is not valid Unicode: character {at}, {text[at]!r}, is a lone surrogate, as "
                "Python reads bytes that are not UTF-8"
            ) from error
        return [self.bos_id, *ids] if bos and self.bos_id is not None else ids

    def _as_text(self, text: str) -> list[int]:
        """Tokens of a text, none of them a control token."""
        controls = self.control_texts
        if self._plain is None or self._plain[0] != controls:
            kept = [name for name in self._spelled if name not in controls]
            self._plain = controls, self._encoder(kept)
        never = {self._spelled[name] for name in controls}
        encoded = self._plain[1].encode(text)
        ids: list[int] = []
        for token, (start, end) in zip(encoded.ids, encoded.offsets, strict=True):
            if token not in never:
                ids.append(token)
            else:  # a word of its own, which the vocabulary holds: in two parts
                ids += self._as_text(text[start : start + 1])
                ids += self._as_text(text[start + 1 : end])
        return ids

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of tokens; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(self.piece(token) for token in tokens).decode("utf-8", "replace")

    def piece(self, token: int, previous: int | None = None) -> bytes:
        """UTF-8 bytes, perhaps not a whole character, that `token` adds; `previous` has no part."""
        self._check(token)
        if token in self._special:
            return b""
        text = self._texts[self._ends[token] : self._ends[token + 1]].decode(
            "utf-8", "surrogatepass"
        )
        try:
            return bytes(self._byte_of[char] for char in text)
        except KeyError:  # a user-defined token is plain text
            return text.encode()

    def _check(self, token: int) -> None:
        if not 0 <= token < self.vocab_size:
            raise InvalidArgumentError(
                f"token {token} is outside the vocabulary of {self.vocab_size}"
            )
