"""The reference that every backend and every kernel is compared with.

Plain NumPy, written from the specification and from nothing in ``kvedge``: INT8 quantization in
float32, exactly as it is promised byte for byte, and attention in float64 over the stored values.
Short enough to be checked by reading; no case is made fast.

Shapes: ``len`` tokens, ``H`` KV heads, ``D`` head_dim, ``G`` groups of a row, ``N`` query heads,
``n`` query rows.
"""

from __future__ import annotations

import numpy as np

FLOAT32 = np.finfo(np.float32)
FLOAT16_MAX = 65504.0

#: The numerics contract: max|out - ref| <= TOLERANCE * max|ref|.
TOLERANCE = 2e-4


# ------------------------------------------------------------------------------------------------
# INT8 rows


def quantize(rows, group_size=None, scale_dtype="float32"):
    """Quantize float32 ``rows`` (..., D) to int8 codes (..., D) and scales (..., G)."""
    rows = np.asarray(rows)
    assert rows.dtype == np.float32, rows.dtype
    groups = group_slices(rows.shape[-1], group_size)
    codes = np.empty(rows.shape, np.int8)
    scales = np.empty((*rows.shape[:-1], len(groups)), scale_dtype)
    for g, channels in enumerate(groups):
        codes[..., channels], scales[..., g] = _quantize_group(rows[..., channels], scale_dtype)
    return codes, scales


def group_slices(head_dim, group_size):
    """The channels of each group of a row; the last group may be shorter."""
    size = min(group_size or head_dim, head_dim)
    return [slice(at, min(at + size, head_dim)) for at in range(0, head_dim, size)]


def _quantize_group(x, scale_dtype):
    peak = np.abs(x).max(axis=-1, keepdims=True)  # (..., 1) float32
    scale = peak / np.float32(127)
    if scale_dtype == "float16":
        stored = float16_not_below(scale)
        divisor = np.where(stored == 0, np.float16(1), stored).astype(np.float32)
        codes = np.rint(x * (np.float32(1) / divisor))
    else:
        stored = scale
        # 127 / peak would overflow for the smallest rows; a power of two changes no digit
        lift = np.where(peak < np.float32(2.0**-96), np.float32(2.0**96), np.float32(1))
        lifted = np.where(peak == 0, np.float32(1), peak * lift)
        codes = np.rint((x * lift) * (np.float32(127) / lifted))
    codes = np.where(scale == 0, np.float32(0), codes)
    assert np.abs(codes).max(initial=0) <= 127
    return codes.astype(np.int8), stored[..., 0]


def float16_not_below(scale):
    """The smallest float16 that is >= ``scale`` (float32, >= 0); OverflowError past 65504."""
    if (scale > FLOAT16_MAX).any():
        raise OverflowError("a scale leaves the range of float16")
    nearest = scale.astype(np.float16)
    with np.errstate(over="ignore"):
        above = np.nextafter(nearest, np.float16(np.inf))
    return np.where(nearest.astype(np.float32) < scale, above, nearest)


def dequantize(codes, scales, group_size=None, offset=None, dtype=np.float64):
    """Codes (..., H, D) and scales (..., H, G) back to values; ``offset`` (H, D) for keys.

    In float64 this is exact; in float32 it is what the getters promise, bit for bit.
    """
    groups = group_slices(codes.shape[-1], group_size)
    out = np.empty(codes.shape, dtype)
    for g, channels in enumerate(groups):
        out[..., channels] = codes[..., channels].astype(dtype) * scales[..., g, None].astype(dtype)
    if offset is not None:
        with np.errstate(over="ignore"):
            out = out + offset.astype(dtype)
    if dtype == np.float32:
        out = np.clip(out, -FLOAT32.max, FLOAT32.max)
    return out


def automatic_key_offset(keys):
    """key_offset="auto": the mean of the first keys (n, H, D) in channels whose range it halves."""
    mean = keys.astype(np.float64).mean(axis=0).astype(np.float32)
    with np.errstate(all="ignore"):
        narrow = 2 * np.abs(keys - mean).max(axis=0) <= np.abs(keys).max(axis=0)
    return np.where(narrow, mean, np.float32(0))


def small_float(codes, mantissa_bits, bias):
    """Codes of 8 bits, a sign and exponents of `bias` before the mantissa, to float64."""
    codes = codes.astype(np.int64)
    exponent, mantissa = (
        codes >> mantissa_bits & (0x7F >> mantissa_bits),
        codes & (2**mantissa_bits - 1),
    )
    digits = np.where(exponent == 0, mantissa, 2**mantissa_bits + mantissa)  # or subnormal
    size = digits * 2.0 ** (np.maximum(exponent, 1) - bias - mantissa_bits)
    return np.where(codes >> 7 == 1, -size, size)


def q8_0(codes):
    """Bytes (..., 34 per 32 channels) of ggml's q8_0 as float64."""
    groups = np.ascontiguousarray(codes).reshape(*codes.shape[:-1], -1, 34)
    scales = np.ascontiguousarray(groups[..., :2]).view("<f2").astype(np.float64)
    return (groups[..., 2:].view(np.int8) * scales).reshape(*codes.shape[:-1], -1)


def int4_levels(codes, dim):
    """Two codes to a byte, the first in the lower half, to the levels they stand for."""
    half = [6, 18, 31, 44, 58, 75, 96, 127]
    levels = np.array([-level for level in reversed(half)] + half)
    return levels[np.stack([codes % 16, codes // 16], -1).reshape(*codes.shape[:-1], -1)[..., :dim]]


#: Codes of formats without scales to float64.
FLOATS = {
    "float32": lambda codes: codes.astype(np.float64),
    "float16": lambda codes: codes.astype(np.float64),
    "bfloat16": lambda codes: (codes.astype(np.uint32) << 16).view(np.float32).astype(np.float64),
    "fp8_e4m3": lambda codes: small_float(codes, 3, 7),
    "fp8_e5m2": lambda codes: small_float(codes, 2, 15),
}


# ------------------------------------------------------------------------------------------------
# Attention


def visible_tokens(n, length, causal=True, window=None, sink_tokens=0, start=0):
    """Which of ``length`` tokens each of the last ``n`` sees: bool (n, length)."""
    position = np.arange(length - n, length)[:, None]  # of each query row
    token = np.arange(length)[None, :]
    seen = np.ones((n, length), bool)
    if causal:
        seen &= token <= position
    if window is not None:
        seen &= (token > position - window) | (token < start + sink_tokens)
    return seen & (token >= start)


def logits(
    query,
    keys,
    *,
    scale=None,
    causal=True,
    window=None,
    sink_tokens=0,
    softcap=None,
    mask=None,
    start=0,
    alibi_slopes=None,
):
    """Masked logits (N, n, len) float64 of ``query`` (n, N, D) on ``keys`` (len, H, D)."""
    n, num_heads, head_dim = query.shape
    length, num_kv_heads, _ = keys.shape
    scale = 1 / np.sqrt(head_dim) if scale is None else float(scale)

    grouped = query.astype(np.float64).reshape(n, num_kv_heads, -1, head_dim)  # (n, H, N/H, D)
    s = np.einsum("nhgd,thd->hgnt", grouped, keys.astype(np.float64), optimize=True)
    s = s.reshape(num_heads, n, length) * scale
    if softcap is not None:
        s = softcap * np.tanh(s / softcap)
    if alibi_slopes is not None:
        position = np.arange(length - n, length)[:, None]
        distance = np.arange(length)[None, :] - position  # (n, len), <= 0 for what is past
        s = s + np.asarray(alibi_slopes, np.float64)[:, None, None] * distance
    if mask is not None:
        mask = np.asarray(mask)
        if mask.ndim == 2 and n == 1 and mask.shape[0] == num_heads:
            mask = mask[:, None, :]  # (N, len) for a single query row
        s = np.where(mask, s, -np.inf) if mask.dtype == bool else s + mask.astype(np.float64)
    return np.where(visible_tokens(n, length, causal, window, sink_tokens, start), s, -np.inf)


def attention(query, keys, values, *, sink_logits=None, **options):
    """Attention in float64.

    ``query`` (N, D) for the last token stored or (n, N, D) for the last n; ``keys`` (len, H, D) and
    ``values`` (len, H, V). ``sink_logits``: (N,), each joins a head's softmax denominator. Returns
    ``out`` (N, V) or (n, N, V) and ``lse`` (N,) or (n, N), the natural logarithm of the softmax
    denominator (learned sinks included).
    """
    rows = query if query.ndim == 3 else query[None]
    s = logits(rows, keys, **options)  # (N, n, len)
    num_heads, n, length = s.shape
    num_kv_heads = keys.shape[1]

    sink = np.full((num_heads, 1), -np.inf)
    if sink_logits is not None:
        sink = np.asarray(sink_logits, np.float64)[:, None]
    peak = np.maximum(s.max(axis=-1), sink)  # (N, n)
    anchor = np.where(np.isfinite(peak), peak, 0)
    weight = np.exp(s - anchor[..., None])
    total = weight.sum(axis=-1) + np.exp(sink - anchor)
    with np.errstate(divide="ignore"):
        lse = anchor + np.log(total)

    weight = weight / np.where(total == 0, 1, total)[..., None]
    weight = weight.reshape(num_kv_heads, -1, n, length)
    out = np.einsum("hgnt,thd->nhgd", weight, values.astype(np.float64), optimize=True)
    out = out.reshape(n, num_heads, -1)
    return (out, lse.T) if query.ndim == 3 else (out[0], lse[:, 0])


def merge(outs, lses):
    """Exact merge of attention over disjoint parts: outs [(..., N, D)], lses [(..., N)]."""
    lses = np.stack([np.asarray(lse, np.float64) for lse in lses])
    total = np.logaddexp.reduce(lses, axis=0)
    weights = np.exp(lses - np.where(np.isfinite(total), total, 0))
    return sum(
        w[..., None] * np.asarray(out, np.float64) for w, out in zip(weights, outs, strict=True)
    )


# ------------------------------------------------------------------------------------------------
# Rotary positions


def rotate(keys, delta, *, base=10000.0, interleaved=False, rotary_dim=None, inv_freq=None):
    """Rotate ``keys`` (..., D) on by ``delta`` positions of RoPE, in float64.

    Pairs are (i, i + rotary_dim/2), or (2i, 2i + 1) if ``interleaved``; channels from
    ``rotary_dim`` on stay as they are.
    """
    out = np.array(keys, np.float64)
    width = out.shape[-1] if rotary_dim is None else rotary_dim
    if inv_freq is None:
        inv_freq = base ** (-np.arange(0, width, 2) / width)
    angle = delta * np.asarray(inv_freq, np.float64)  # (width / 2,)
    if interleaved:
        first, second = slice(0, width, 2), slice(1, width, 2)
    else:
        first, second = slice(0, width // 2), slice(width // 2, width)
    a, b = out[..., first].copy(), out[..., second].copy()
    out[..., first] = a * np.cos(angle) - b * np.sin(angle)
    out[..., second] = a * np.sin(angle) + b * np.cos(angle)
    return out
