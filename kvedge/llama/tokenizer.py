"""Text to tokens and back: byte pair encoding by scores, as in SentencePiece and llama2.c.

A tokenizer here is any object with `vocab_size`, `bos_id`, `stop_ids`, ``encode(text)``,
``decode(tokens)`` and ``piece(token, previous)``; :mod:`.byte_level_bpe` has the other one. Those
that chat also have `control_texts`.
"""

from __future__ import annotations

import functools
import os
import re
import struct
from codecs import IncrementalDecoder, getincrementaldecoder
from collections.abc import Collection, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from pathlib import Path
from typing import Protocol

import numpy as np

from ..errors import CorruptFileError, InvalidArgumentError
from .chat_template import ChatTemplate

__all__ = [
    "ScoredBpeTokenizer",
    "Tokenizer",
    "WithControlTexts",
    "any_of",
    "load_llama2c_tokenizer",
    "text_decoder",
]

SPACE_SIGN = "\u2581"  # in SentencePiece's pieces, and in texts that come from it
_BYTE_TOKEN = re.compile(rb"<0x([0-9A-F]{2})>")  # SentencePiece's name for a byte without a token


class Tokenizer(Protocol):
    """What :func:`kvedge.llama.generate` needs of a tokenizer."""

    #: How the model was taught to chat, if it was.
    chat_template: ChatTemplate | None

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""

    @property
    def bos_id(self) -> int | None:
        """Token that begins a text."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end one."""

    @property
    def control_texts(self) -> frozenset[str]:
        """Texts of control tokens, which ``encode(special=False)`` takes as text."""

    def encode(
        self,
        text: str,
        *,
        bos: bool | None = None,
        space_prefix: bool | None = None,
        special: bool = True,
    ) -> list[int]:
        """Tokens of a text; None means what the model was trained with."""

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of tokens."""

    def piece(self, token: int, previous: int | None = None) -> bytes:
        """UTF-8 bytes, perhaps not a whole character, that `token` adds after `previous`."""


class WithControlTexts:
    """The control texts of a tokenizer, found when they are first needed.

    Those of the tokens that a text can spell out which are a chat's tags, not words: control
    tokens, those that end a text, and those that the chat template writes, whatever type the
    model's file gives them. White space and words are none.
    """

    chat_template: ChatTemplate | None
    _spelled: Mapping[str, int]  # tokens that a text can spell out
    _controls: Collection[int]  # control tokens
    _found: tuple[ChatTemplate | None, frozenset[str] | None] = (None, None)  # of which template

    @property
    def control_texts(self) -> frozenset[str]:
        """Texts of control tokens, which ``encode(special=False)`` takes as text."""
        template, texts = self._found
        if texts is None or template is not self.chat_template:
            source = "" if self.chat_template is None else self.chat_template.source
            texts = frozenset(
                text
                for text, token in self._spelled.items()
                if token in self._controls
                or (text.startswith("<|") and text.endswith("|>"))  # a template may put it together
                or (text in source and text[:1] in "<[" and len(text) > 2)
            )
            self._found = self.chat_template, texts
        return texts


class ScoredBpeTokenizer(WithControlTexts):
    """Byte pair encoding that joins the best scored pair first (SentencePiece's BPE).

    Parameters
    ----------
    pieces : sequence of bytes
        Text of each token, UTF-8, with plain spaces. ``<0x41>`` stands for the single byte 0x41.
        SentencePiece's sign for a space, U+2581, is a space in texts to encode.
    scores : sequence of float
        The higher, the earlier a token is made from its two halves.
    bos_id : int
        Token that begins a sequence.
    stop_ids : collection of int
        Tokens that end one.
    special_ids : collection of int
        Tokens without text (begin, end, unknown, control). Never produced from text.
    spelled_ids : collection of int
        Tokens recognised where a text spells them out, such as ``<start_of_turn>``.
    unknown_id : int
        Stands for a byte that has no token of its own.
    add_bos, add_space_prefix : bool
        What `encode` does when not told. Texts begin with a space of the tokenizer's own, which
        decoding drops, only where `add_space_prefix` is True.

    Raises
    ------
    InvalidArgumentError
        If the numbers of pieces and scores differ, a score is not finite, or an id is outside the
        vocabulary.
    """

    def __init__(
        self,
        pieces: Sequence[bytes],
        scores: Sequence[float],
        *,
        bos_id: int = 1,
        stop_ids: Collection[int] = (1, 2),
        special_ids: Collection[int] = (0, 1, 2),
        spelled_ids: Collection[int] = (),
        unknown_id: int = 0,
        add_bos: bool = True,
        add_space_prefix: bool = True,
    ) -> None:
        if len(pieces) != len(scores):
            raise InvalidArgumentError(f"{len(pieces)} tokens, but {len(scores)} scores")
        if not np.isfinite(scores).all():
            raise InvalidArgumentError("a token's score is NaN or infinite")
        self.vocab_size = len(pieces)
        for token in (bos_id, unknown_id, *stop_ids, *special_ids, *spelled_ids):
            self._check(token)
        self.chat_template: ChatTemplate | None = None
        self.bos_id = bos_id
        self.stop_ids = frozenset(stop_ids)
        self.add_bos = add_bos
        self.add_space_prefix = add_space_prefix
        self._pieces = list(pieces)  # what pairs are looked up by
        self._scores = list(scores)
        self._text = list(pieces)  # what a token prints
        self._byte_ids = [unknown_id] * 256
        for token, piece in enumerate(pieces):
            if match := _BYTE_TOKEN.fullmatch(piece):
                self._text[token] = bytes([int(match[1], 16)])
                self._byte_ids[self._text[token][0]] = token
        for token in special_ids:
            self._text[token] = b""
        # first of equal pieces wins; special tokens are not made from text
        self._spelled_ids = frozenset(spelled_ids)
        self._spelled = {pieces[token].decode("utf-8", "replace"): token for token in spelled_ids}
        self._spelled_in = any_of(frozenset(self._spelled))
        special = frozenset(special_ids)
        self._controls = special | self.stop_ids
        self._ids: dict[bytes, int] = {}
        for token, piece in enumerate(pieces):
            if token not in special:
                self._ids.setdefault(piece, token)

    def __repr__(self) -> str:
        return f"ScoredBpeTokenizer(vocab_size={self.vocab_size}, bos_id={self.bos_id})"

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
            Any text; a character without a token becomes the tokens of its UTF-8 bytes.
        bos : bool, optional
            Begin with the BOS token. None: as the model was trained.
        space_prefix : bool, optional
            Encode as if a space came before (SentencePiece's dummy prefix), unless the text is
            empty. None: as the model was trained. Say False when continuing a text.
        special : bool
            Control tokens that the text spells out, such as ``<end_of_turn>``, become these tokens;
            False: they are text as any other. Say False for what others wrote.

        Returns
        -------
        list of int

        Raises
        ------
        InvalidArgumentError
            If `text` is not a string, or holds half of a surrogate pair.
        """
        if not isinstance(text, str):
            raise InvalidArgumentError(f"text must be str, got {type(text).__name__}")
        bos = self.add_bos if bos is None else bos
        space_prefix = self.add_space_prefix if space_prefix is None else space_prefix
        text = text.replace(SPACE_SIGN, " ")
        controls = frozenset() if special else self.control_texts
        spelled_in = any_of(frozenset(self._spelled) - controls) if controls else self._spelled_in
        never = frozenset(self._spelled[token] for token in controls)
        if text and space_prefix and not spelled_in.match(text):
            text = " " + text
        found = [self.bos_id] * bos
        at = 0
        for match in spelled_in.finditer(text):
            found += [*self._encode(text[at : match.start()], never), self._spelled[match[0]]]
            at = match.end()
        return [*found, *self._encode(text[at:], never)]

    def _encode(self, text: str, never: frozenset[int] = frozenset()) -> list[int]:
        """Tokens of a text, none of them spelled out in it; `never`: none of these."""
        ids = []
        for character in text:
            try:
                # surrogateescape: bytes of a command line that are not UTF-8 stay what they were
                utf8 = character.encode("utf-8", "surrogateescape")
            except UnicodeEncodeError as error:
                raise InvalidArgumentError(f"text holds a lone surrogate, {character!r}") from error
            token = self._ids.get(utf8)
            ids.extend([token] if token is not None else [self._byte_ids[byte] for byte in utf8])
        return self._merge(ids, never)

    def _merge(self, ids: list[int], never: frozenset[int]) -> list[int]:
        """Join the best scored pair, the leftmost of equals, until no pair is a token.

        The result is that of llama2.c's loop over all pairs; a heap of candidates finds it in
        n log n steps instead of n squared.
        """
        n = len(ids)
        before, after = list(range(-1, n - 1)), list(range(1, n + 1))  # neighbours still alive
        heap: list[tuple[float, int, int, int, int, int]] = []

        def offer(i: int, j: int) -> None:
            if i < 0 or j >= n:
                return
            joined = self._ids.get(self._pieces[ids[i]] + self._pieces[ids[j]])
            if joined is not None and joined not in never:
                heappush(heap, (-self._scores[joined], i, j, ids[i], ids[j], joined))

        for i in range(n - 1):
            offer(i, i + 1)
        while heap:
            _, i, j, left, right, joined = heappop(heap)
            if ids[i] != left or ids[j] != right:
                continue  # one of the two was joined to something else meanwhile
            ids[i], ids[j] = joined, -1
            after[i] = after[j]
            if after[i] < n:
                before[after[i]] = i
            offer(before[i], i)
            offer(i, after[i])
        return [token for token in ids if token >= 0]

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of tokens; bytes that are not UTF-8 become U+FFFD.

        The space that `encode` had put in front of a text is dropped: after BOS, or at the
        beginning for a model whose texts have none.
        """
        previous, text = None if self.add_bos else self.bos_id, []
        for token in tokens:
            text.append(self.piece(token, previous))
            previous = token
        return b"".join(text).decode("utf-8", "replace")

    def piece(self, token: int, previous: int | None = None) -> bytes:
        """UTF-8 bytes, perhaps not a whole character, that `token` adds after `previous`."""
        self._check(token)
        text = self._text[token]
        # `encode` puts no space before a token that the text spells out
        begins = previous == self.bos_id and token not in self._spelled_ids
        if begins and self.add_space_prefix and text.startswith(b" "):
            return text[1:]
        return text

    def _check(self, token: int) -> None:
        if not 0 <= token < self.vocab_size:
            raise InvalidArgumentError(
                f"token {token} is outside the vocabulary of {self.vocab_size}"
            )


@functools.lru_cache(maxsize=8)
def any_of(texts: frozenset[str]) -> re.Pattern[str]:
    """Expression that finds the longest of some texts."""
    longest_first = sorted(filter(None, texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def text_decoder() -> IncrementalDecoder:
    """A decoder whose ``decode(bytes)`` gives the characters complete so far.

    ``decode(b"", final=True)`` gives U+FFFD for a character that stayed incomplete.
    """
    return getincrementaldecoder("utf-8")("replace")


def load_llama2c_tokenizer(
    path: str | os.PathLike[str], vocab_size: int | None = None
) -> ScoredBpeTokenizer:
    """Load a llama2.c ``tokenizer.bin``.

    The file holds int32 longest piece in bytes, then for each token float32 score, int32 length
    in bytes, and the bytes. Token 0 is unknown, 1 begins a sequence (BOS), 2 ends one.

    Parameters
    ----------
    path : path-like
        The file.
    vocab_size : int, optional
        Number of tokens that the model has.

    Returns
    -------
    ScoredBpeTokenizer

    Raises
    ------
    CorruptFileError
        If the file ends within a token or has fewer than `vocab_size`, or a length or a score
        makes no sense.
    InvalidArgumentError
        If it has more than `vocab_size` tokens.
    """
    data = Path(path).read_bytes()
    entry = struct.Struct("<fi")
    if len(data) < 4:
        raise CorruptFileError(f"{path}: a llama2.c tokenizer has 4 bytes or more, got {len(data)}")
    (longest,) = struct.unpack_from("<i", data)
    pieces: list[bytes] = []
    scores: list[float] = []
    position = 4
    while position < len(data):
        if position + entry.size > len(data):
            raise CorruptFileError(f"{path}: the file ends within token {len(pieces)}")
        score, length = entry.unpack_from(data, position)
        position += entry.size
        if not 0 <= length <= longest:
            raise CorruptFileError(
                f"{path}: token {len(pieces)} has a length of {length} bytes, "
                f"expected 0 to {longest}"
            )
        if not np.isfinite(score):
            raise CorruptFileError(f"{path}: token {len(pieces)} has the score {score}")
        if position + length > len(data):
            raise CorruptFileError(f"{path}: the file ends within token {len(pieces)}")
        pieces.append(data[position : position + length])
        scores.append(score)
        position += length
    if len(pieces) < 3:
        raise CorruptFileError(f"{path}: {len(pieces)} tokens; unknown, BOS and EOS are needed")
    if vocab_size is not None and len(pieces) != vocab_size:
        # fewer: cut off between two tokens, or else another model's
        error = CorruptFileError if len(pieces) < vocab_size else InvalidArgumentError
        raise error(f"{path}: the tokenizer has {len(pieces)} tokens, the model has {vocab_size}")
    return ScoredBpeTokenizer(pieces, scores)
