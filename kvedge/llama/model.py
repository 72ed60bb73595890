"""The forward pass of a model of Llama's kind in NumPy, its keys and values in a KVCache."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .. import KVCache
from ..cache.cache import state_of
from ..cache.editing import evict_due
from ..core.options import PrecisionBits
from ..core.types import StorageDtype
from ..errors import CapacityExceededError, InvalidArgumentError, ShapeMismatchError
from ..eviction import Eviction
from ..policy import KvCachePolicy
from ..rope import Rope
from . import gguf_file
from .checkpoint import load_checkpoint, read_checkpoint_config
from .config import LlamaConfig
from .matrix import product, rows_of
from .tokenizer import Tokenizer, load_llama2c_tokenizer
from .weights import LlamaWeights

__all__ = ["LlamaModel", "read_config"]


class LlamaModel:
    """A Llama model (Touvron et al. 2023) or a relative, ready to run on a :class:`kvedge.KVCache`.

    Relatives are Qwen 2 and 3, Gemma 1 to 3, Phi 3, SmolLM3, Granite: see :class:`LlamaConfig`.
    Make one with :meth:`from_file`.

    Parameters
    ----------
    config : LlamaConfig
        Its sizes.
    weights : LlamaWeights
        Its weights.
    tokenizer : Tokenizer, optional
        Its tokenizer.
    """

    def __init__(
        self, config: LlamaConfig, weights: LlamaWeights, tokenizer: Tokenizer | None = None
    ) -> None:
        self.config = config
        self.weights = weights
        self.tokenizer = tokenizer

    @classmethod
    def from_file(
        cls,
        path: str | os.PathLike[str],
        tokenizer: str | os.PathLike[str] | Tokenizer | None = None,
    ) -> LlamaModel:
        """Load a llama2.c checkpoint or a GGUF file; its first bytes tell which it is.

        Parameters
        ----------
        path : path-like
            The model.
        tokenizer : path-like or Tokenizer, optional
            A llama2.c ``tokenizer.bin``, or a tokenizer object. None: the one inside the GGUF file;
            for a llama2.c checkpoint, ``tok{vocab_size}.bin`` or ``tokenizer.bin`` beside it if
            there is one, else the model has no tokenizer.

        Returns
        -------
        LlamaModel

        Raises
        ------
        CorruptFileError
            If a file is damaged, truncated, or something else altogether.
        UnsupportedModelError
            If the file is sound, but of an architecture or format that this runtime lacks.
        OutOfMemoryError
            The weights would take more than the memory that is available; nothing was loaded.
        MissingExtraError
            For a GGUF file without the package ``gguf`` (``pip install kvedge[gguf]``), or one with
            a byte-level tokenizer without the package ``tokenizers``.
        """
        path = Path(path)
        if gguf_file.is_gguf(path):
            config, weights, own_tokenizer = gguf_file.load_gguf(
                path, with_tokenizer=tokenizer is None
            )
            source = own_tokenizer if tokenizer is None else tokenizer
        else:
            config, weights = load_checkpoint(path)
            source = tokenizer
            if source is None:
                beside = (f"tok{config.vocab_size}.bin", "tokenizer.bin")
                found = (path.with_name(name) for name in beside)
                source = next((file for file in found if file.exists()), None)
        if isinstance(source, (str, os.PathLike)):
            return cls(config, weights, load_llama2c_tokenizer(source, config.vocab_size))
        return cls(config, weights, source)

    def __repr__(self) -> str:
        c = self.config
        return (
            f"LlamaModel(dim={c.dim}, num_layers={c.num_layers}, num_heads={c.num_heads}, "
            f"num_kv_heads={c.num_kv_heads}, head_dim={c.head_dim}, vocab_size={c.vocab_size}, "
            f"max_seq_len={c.max_seq_len})"
        )

    def new_cache(self, dtype: StorageDtype = "int8", **options: Any) -> KVCache:
        """An empty cache of this model's shape.

        Parameters
        ----------
        dtype : kvedge.core.types.StorageDtype
            How keys and values are stored, such as "int8": as of :class:`kvedge.KVCache`.
        **options
            Further arguments of :class:`kvedge.KVCache`, such as `group_size`; `max_seq_len` is
            the model's own unless given, and `window` those of its layers. `policy`, a
            :class:`kvedge.LayerPolicy`, says how each layer is stored, in place of `dtype`;
            `eviction`, a :class:`kvedge.Eviction`, which tokens are forgotten.

        Returns
        -------
        KVCache

        Raises
        ------
        InvalidArgumentError
            An option that is none, or a policy for another number of layers.
        """
        eviction = Eviction.of(options.pop("eviction", None))
        if (policy := options.pop("policy", None)) is not None:
            policy.check(self.config.num_layers)
            options |= policy.cache_options()
        options.setdefault("max_seq_len", self.config.max_seq_len)
        c = self.config
        if c.windows is not None:
            options.setdefault("window", c.windows)
        cache = KVCache(c.num_layers, c.num_kv_heads, c.head_dim, dtype=dtype, **options)
        if eviction is not None:
            KvCachePolicy(eviction=eviction).attach(cache)
        return cache

    def context_limit(self, cache: KVCache) -> int:
        """Tokens that fit: the lesser of the model's context length and the cache's capacity."""
        if cache.max_seq_len is None:  # it grows
            return self.config.max_seq_len
        return min(self.config.max_seq_len, cache.max_seq_len)

    def forward(
        self,
        tokens: Sequence[int] | np.ndarray,
        cache: KVCache,
        *,
        last_only: bool = False,
        num_threads: int | None = None,
        precision_bits: PrecisionBits = None,
    ) -> np.ndarray:
        """Run tokens through the model and append their keys and values to the cache.

        Each token sees all that the cache held before, the tokens before it, and itself. If
        anything fails the cache holds what it held before. A cache with eviction first keeps
        within its budget.

        Parameters
        ----------
        tokens : sequence of int, n >= 1 of them
            They take the positions ``len(cache)`` and following.
        cache : KVCache
            From :meth:`new_cache`.
        last_only : bool
            Compute the logits of the last token only: what generation needs of a prompt.
        num_threads, precision_bits : int, optional
            Passed on to ``cache.attend``.

        Returns
        -------
        ndarray, float32
            Logits of the token that follows each: shape (n, vocab_size), or (vocab_size,) with
            `last_only`.

        Raises
        ------
        CapacityExceededError
            If the context would grow longer than :meth:`context_limit`.
        InvalidArgumentError
            If there is no token, or one is outside the vocabulary.
        ShapeMismatchError
            If the cache was made for another shape.
        """
        c, w = self.config, self.weights
        tokens = _checked_tokens(tokens, c.vocab_size)  # (n,)
        n, start = tokens.size, len(cache)
        self._check_cache(cache, n)
        if isinstance(cache, KVCache):
            evict_due(state_of(cache), n)
        # {rope: (cosine, sine)}, each (n, 1, rotary_dim / 2)
        turns = {
            rope: _rotation(np.arange(start, start + n), rope, c.rope_magnitude)
            for rope in {c.rope_of(i) for i in range(c.num_layers)}
            if rope is not None
        }
        num_qk_heads = c.num_heads + c.num_kv_heads
        activate = _gelu if c.activation == "gelu" else _silu

        x = rows_of(w.token_embedding, tokens)  # (n, dim)
        if c.embedding_scale != 1:
            x *= np.float32(c.embedding_scale)
        try:
            for i, layer in enumerate(w.layers):
                # attention: norm, then query, key and value of every head
                h = _rms_norm(x, layer.attention_norm, c.norm_eps)  # (n, dim)
                qkv = product(h, layer.wqkv, num_threads)  # (n, (heads + 2 * KV heads) * head_dim)
                if layer.bqkv is not None:
                    qkv += layer.bqkv
                qkv = qkv.reshape(n, -1, c.head_dim)  # (n, num_heads + 2 * num_kv_heads, head_dim)
                q, k = qkv[:, : c.num_heads], qkv[:, c.num_heads : num_qk_heads]
                v = np.ascontiguousarray(qkv[:, num_qk_heads:])  # (n, num_kv_heads, head_dim)
                if layer.q_norm is not None and layer.k_norm is not None:
                    q = _rms_norm(q, layer.q_norm, c.norm_eps)
                    k = _rms_norm(k, layer.k_norm, c.norm_eps)

                # RoPE: turn queries and keys by their position
                rope = c.rope_of(i)
                if rope is not None:
                    q, k = (_rotate(rows, *turns[rope], rope.interleaved) for rows in (q, k))
                q, k = np.ascontiguousarray(q), np.ascontiguousarray(k)

                # store keys and values, attend to all that is stored, back into the residual stream
                cache.append(i, k, v)
                attended = cache.attend(  # (n, num_heads, head_dim)
                    i,
                    q,
                    num_threads=num_threads,
                    precision_bits=precision_bits,
                    **self._attention_options(i, cache),
                )
                h = product(attended.reshape(n, -1), layer.wo, num_threads)  # (n, dim)
                if layer.attention_post_norm is not None:
                    h = _rms_norm(h, layer.attention_post_norm, c.norm_eps)
                x += _scaled(h, c.residual_scale)

                # feed-forward network: w2(silu(w1 x) * w3 x)
                h = _rms_norm(x, layer.ffn_norm, c.norm_eps)  # (n, dim)
                gate_up = product(h, layer.w13, num_threads)  # (n, 2 * hidden_dim)
                gate, up = gate_up[:, : c.hidden_dim], gate_up[:, c.hidden_dim :]
                h = product(activate(gate) * up, layer.w2, num_threads)  # (n, dim)
                if layer.ffn_post_norm is not None:
                    h = _rms_norm(h, layer.ffn_post_norm, c.norm_eps)
                x += _scaled(h, c.residual_scale)
            cache.advance(n)
        except BaseException:  # also an interrupt: layers must not be left out of step
            cache.truncate(start)
            raise

        if last_only:
            x = x[-1]  # (dim,)
        logits = product(_rms_norm(x, w.final_norm, c.norm_eps), w.output, num_threads)
        logits = _scaled(logits, c.logit_scale)
        if c.logit_softcap is not None:
            logits = np.float32(c.logit_softcap) * np.tanh(logits / np.float32(c.logit_softcap))
        return logits  # (n, vocab_size)

    def _attention_options(self, layer: int, cache: KVCache) -> dict[str, Any]:
        """What attention of a layer does otherwise than Llama's."""
        c = self.config
        options: dict[str, Any] = {}
        if c.attention_scale is not None:
            options["scale"] = c.attention_scale
        if c.attention_softcap is not None:
            options["softcap"] = c.attention_softcap
        if (window := c.window_of(layer)) is not None:
            kept = cache.window[layer]  # what its storage keeps, and attends with by default
            options["window"] = window if kept is None else min(window, kept)
        return options

    def _check_cache(self, cache: KVCache, n: int) -> None:
        """Refuse a cache of another shape, or without room for n tokens."""
        c = self.config
        expected = (c.num_layers, c.num_kv_heads, c.head_dim)
        for shape in _shapes_of(cache):
            if (cache.num_layers, *shape) != expected:
                raise ShapeMismatchError(
                    f"the model needs a cache of (layers, KV heads, head_dim) = {expected}, got "
                    f"{(cache.num_layers, *shape)}"
                )
        limit = self.context_limit(cache)
        if len(cache) + n > limit:
            raise CapacityExceededError(
                f"{n} more after {len(cache)} tokens do not fit a context of {limit} (the model "
                f"was trained for {c.max_seq_len}, the cache is limited to {cache.max_seq_len})"
            )


def _shapes_of(cache: Any) -> set[tuple[int, int]]:
    """KV heads and head_dim of the layers, which may be stored in several ways."""
    local = getattr(cache, "part", cache)  # what a rank holds of a ShardedKVCache
    if isinstance(local, KVCache):
        configs = (store.config for store in state_of(local).stores)
        return {(config.num_kv_heads, config.head_dim) for config in configs}
    return {(cache.num_kv_heads, cache.head_dim)}


def read_config(path: str | os.PathLike[str]) -> LlamaConfig:
    """Sizes of the model in a llama2.c checkpoint or a GGUF file, without loading its weights.

    Parameters
    ----------
    path : path-like
        The model.

    Returns
    -------
    LlamaConfig

    Raises
    ------
    CorruptFileError, UnsupportedModelError, MissingExtraError
        As :meth:`LlamaModel.from_file`.
    """
    path = Path(path)
    if gguf_file.is_gguf(path):
        return gguf_file.read_gguf_config(path)
    return read_checkpoint_config(path)


def _checked_tokens(tokens: Sequence[int] | np.ndarray, vocab_size: int) -> np.ndarray:
    """Token ids as an array of shape (n,), each inside the vocabulary."""
    array = np.asarray(tokens)
    if array.ndim != 1 or array.size == 0 or not np.issubdtype(array.dtype, np.integer):
        raise InvalidArgumentError(
            f"tokens must be a sequence of one or more integers, got shape {array.shape} "
            f"of {array.dtype}"
        )
    if array.min() < 0 or array.max() >= vocab_size:
        raise InvalidArgumentError(
            f"tokens must be in 0..{vocab_size - 1}, got {array.min()}..{array.max()}"
        )
    return array


def _rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """Divide by the root of the mean square (Zhang and Sennrich 2019); x is (..., dim)."""
    mean_square = (x * x).sum(axis=-1, keepdims=True) / x.shape[-1]  # (..., 1)
    return np.asarray(x / np.sqrt(mean_square + eps) * weight)


def _silu(x: np.ndarray) -> np.ndarray:
    """x times its logistic sigmoid."""
    with np.errstate(over="ignore"):  # exp(-x) may be infinite: x / inf is the 0 it should be
        return np.asarray(x / (1 + np.exp(-x)))


def _gelu(x: np.ndarray) -> np.ndarray:
    """The Gaussian error linear unit in its tanh form (Hendrycks and Gimpel 2016)."""
    factor = np.float32(np.sqrt(2 / np.pi))
    inner = factor * (x + np.float32(0.044715) * x * x * x)
    return np.asarray(np.float32(0.5) * x * (1 + np.tanh(inner)))


def _scaled(x: np.ndarray, factor: float) -> np.ndarray:
    return x if factor == 1 else np.asarray(x * np.float32(factor))


def _rotation(positions: np.ndarray, rope: Rope, magnitude: float) -> tuple[np.ndarray, np.ndarray]:
    """Cosine and sine for positions (n,): (n, 1, rotary_dim / 2), the same for every head."""
    angle = positions[:, None, None] * np.array(rope.inv_freq)  # float64 radians
    turns = np.cos(angle) * magnitude, np.sin(angle) * magnitude
    return turns[0].astype(np.float32), turns[1].astype(np.float32)


def _rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, interleaved: bool) -> np.ndarray:
    """Turn pairs of channels of x (n, heads, head_dim) by an angle per token and pair.

    Pairs are neighbours (2i, 2i + 1) where interleaved (Llama as in the paper, llama2.c, GGUF), or
    (i, i + rotary_dim / 2) otherwise (GPT-NeoX, Qwen2). Channels from rotary_dim on stay.
    """
    half = cos.shape[-1]
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        first, second = slice(0, half), slice(half, 2 * half)
    turned = x.copy()
    turned[..., first] = x[..., first] * cos - x[..., second] * sin
    turned[..., second] = x[..., first] * sin + x[..., second] * cos
    return turned
