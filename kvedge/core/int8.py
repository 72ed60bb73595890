"""INT8 rows in NumPy: the same bytes as the kernels in csrc/ give.

Per group of channels, all in float32, m = max|x|:
    scale = m / 127        q = rint(x * (127 / m)), ties to even, in [-127, 127]
A group below 2^-96 is multiplied by 2^96 first, which is exact and keeps 127 / m finite.
With float16 scales the scale is rounded up, so that no code can pass 127, and
q = rint(x * (1 / scale)).
"""

import numpy as np

from kvedge.core.checks import FLOAT32_MAX

_SMALL = np.float32(2.0**-96)
_LIFT = np.float32(2.0**96)


def quantize(rows, config):
    """Quantize rows to int8.

    Parameters
    ----------
    rows : numpy.ndarray
        Finite float32 (n, num_kv_heads, head_dim); with float16 scales within their range.
    config : LayerConfig

    Returns
    -------
    codes : numpy.ndarray
        int8 (n, num_kv_heads, head_dim).
    scales : numpy.ndarray
        float32 or float16 (n, num_kv_heads, num_groups).
    """
    with np.errstate(all="ignore"):
        largest = _group_max(rows, config)  # (n, H, num_groups), as all below
        scales = largest / np.float32(127)
        if config.scale_dtype == "float16":
            scales = _round_up_to_float16(scales)
            inverse = np.float32(1) / scales.astype(np.float32)
            inverse[scales == 0] = 0
            return np.rint(rows * _per_channel(inverse, config)).astype(np.int8), scales
        lift = np.where(largest < _SMALL, _LIFT, np.float32(1))
        inverse = np.float32(127) / (largest * lift)
        inverse[scales == 0] = 0  # a zero row, or one whose scale is below the smallest float32
        lifted = rows * _per_channel(lift, config) if (lift != 1).any() else rows
        return np.rint(lifted * _per_channel(inverse, config)).astype(np.int8), scales


def dequantize(codes, scales, config, *, dtype=np.float32):
    """Codes times scales, as `dtype` (n, num_kv_heads, head_dim).

    In float64 the product is exact; in float32 it is rounded once, as the kernels do, and may be
    infinite by that rounding where the row held numbers next to float32's largest.
    """
    with np.errstate(all="ignore"):
        return codes.astype(dtype) * _per_channel(scales.astype(dtype), config)


def clamp(array):
    """Bring what passed float32's range back to its ends, in place."""
    return np.clip(array, -FLOAT32_MAX, FLOAT32_MAX, out=array)


def _group_max(rows, config):
    magnitudes = np.abs(rows)
    if config.num_groups == 1:
        return magnitudes.max(axis=-1, keepdims=True)
    starts = np.arange(0, config.head_dim, config.group_size)
    return np.maximum.reduceat(magnitudes, starts, axis=-1)


def _per_channel(per_group, config):
    """(..., num_groups) spread over the channels: (..., head_dim), or (..., 1) of one group."""
    if config.num_groups == 1:
        return per_group
    return np.repeat(per_group, config.group_size, axis=-1)[..., : config.head_dim]


def _round_up_to_float16(scales):
    nearest = scales.astype(np.float16)
    above = np.nextafter(nearest, np.float16(np.inf))
    return np.where(nearest.astype(np.float32) < scales, above, nearest)
