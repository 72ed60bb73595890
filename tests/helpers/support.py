"""What the tests of the contract share: rows, filled layers, threads and comparisons."""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import reference

import kvedge
from kvedge import errors
from kvedge.core.formats import FORMATS, IN_RUNS

#: Names of the storage formats without scales, and so without options.
PLAIN = [name for name, form in FORMATS.items() if not form.has_scales]

# ------------------------------------------------------------------------------------------------
# Rows


def normal(rng, *shape):
    """Rows as a model makes them: normal, float32."""
    return rng.standard_normal(shape, dtype=np.float32)


def _tiny(rng, shape):
    """Around 1e-38, where float32 turns from normal to denormal."""
    return (rng.uniform(-3e-38, 3e-38, shape)).astype(np.float32)


def _denormal(rng, shape):
    """Denormal numbers only, down to the smallest."""
    digits = rng.integers(0, 24, shape)
    return (rng.integers(-1, 2, shape) * np.exp2(digits - 149.0)).astype(np.float32)


def _huge(rng, shape):
    """Up to the largest float32."""
    x = rng.uniform(-3e38, 3e38, shape).astype(np.float32)
    x.reshape(-1)[:: x.size // 7 + 1] = np.finfo(np.float32).max
    return x


def _zero(rng, shape):
    """Zeros of both signs."""
    return np.where(rng.integers(0, 2, shape) == 1, np.float32(0), np.float32(-0.0))


def _constant(rng, shape):
    """Every channel of a row the same."""
    return np.broadcast_to(normal(rng, *shape[:-1], 1), shape).copy()


def _outlier(rng, shape):
    """One channel a thousand times the others."""
    x = normal(rng, *shape)
    x[..., rng.integers(shape[-1])] *= 1000
    return x


def _ties(rng, shape):
    """A largest value of 127 and halves everywhere: every rounding is a tie."""
    x = (rng.integers(-127, 127, shape) + 0.5).astype(np.float32)
    x[..., 0] = 127
    return x


def _all_magnitudes(rng, shape):
    """Each row at its own power of ten, from denormal to the largest."""
    exponent = rng.uniform(-44, 37, (*shape[:-1], 1))
    return (rng.standard_normal(shape) * 10.0**exponent).astype(np.float32)


def _at_the_lift(rng, shape):
    """Largest values just below, at and above 2^-96, where the arithmetic changes its path."""
    x = rng.uniform(-1, 1, shape)
    peak = np.float32(2.0**-96)
    near = np.array([np.nextafter(peak, np.float32(0)), peak, np.nextafter(peak, np.float32(1))])
    top = rng.choice(near, (*shape[:-1], 1)).astype(np.float64)
    x = (x * top).astype(np.float32)
    x[..., -1:] = top
    return x


#: What a row can look like: name -> function(rng, shape) -> float32
ROWS = {
    "random": lambda rng, shape: normal(rng, *shape),
    "tiny": _tiny,
    "denormal": _denormal,
    "huge": _huge,
    "zero": _zero,
    "constant": _constant,
    "outlier": _outlier,
    "ties": _ties,
    "all-magnitudes": _all_magnitudes,
    "at-the-lift": _at_the_lift,
}

HEAD_DIMS = [1, 8, 40, 64, 80, 96, 112, 128, 256, 1024]


def group_sizes(head_dim):
    """Whole rows, the usual groups, and one that leaves a short group at the end."""
    return [None, *(size for size in (24, 32, 64, 128) if size < head_dim)]


# ------------------------------------------------------------------------------------------------
# Layers


def filled(layer_class, rng, length, num_kv_heads, head_dim, *, capacity=None, **options):
    """A layer with ``length`` normal tokens."""
    layer = layer_class(capacity or max(length, 1), num_kv_heads, head_dim, **options)
    if length:
        keys = normal(rng, length, num_kv_heads, head_dim)
        layer.extend(keys, normal(rng, length, num_kv_heads, layer.value_head_dim))
    return layer


def stored(layer):
    """The exact float64 keys and values (len, H, D) that a layer holds, from its raw bytes."""
    if layer.dtype in reference.FLOATS:
        to_float64 = reference.FLOATS[layer.dtype]
        return to_float64(layer.key_codes), to_float64(layer.value_codes)
    if layer.dtype == "q8_0":
        return reference.q8_0(layer.key_codes), reference.q8_0(layer.value_codes)
    if layer.dtype in IN_RUNS:  # test_runs.py has their bytes
        return layer.keys().astype(np.float64), layer.values().astype(np.float64)

    def values_of(codes, scales, dim, offset=None):
        if layer.dtype == "int4":
            codes = reference.int4_levels(codes, dim)
        scales = np.asarray(scales).reshape(*codes.shape[:2], -1)
        return reference.dequantize(codes, scales, layer.group_size, offset)

    return (
        values_of(layer.key_codes, layer.key_scales, layer.head_dim, layer.key_offset),
        values_of(layer.value_codes, layer.value_scales, layer.value_head_dim),
    )


#: The largest magnitude of formats that end before float32 does, for tests of magnitudes.
LARGEST = {"float16": 65504.0, "fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}
WIDE = [name for name in FORMATS if name not in LARGEST]


#: What storing normal rows (up to 8) may change of them, at most.
STORAGE_ERROR = dict.fromkeys(FORMATS, 0.05) | {"fp8_e4m3": 0.25, "fp8_e5m2": 0.5, "int4": 1.1}


def huge(layer_class):
    """The largest magnitude that tests give to a kind of layer."""
    return np.float32(LARGEST.get(layer_class._dtype, 3e38))


def content(layer):
    """Everything stored in a layer, as bytes that can be compared."""
    offset, scale = layer.key_offset, layer.key_scale
    return (
        len(layer),
        layer.key_codes.tobytes(),
        np.asarray(layer.key_scales).tobytes(),
        layer.value_codes.tobytes(),
        np.asarray(layer.value_scales).tobytes(),
        None if offset is None else offset.tobytes(),
        None if scale is None else scale.tobytes(),
    )


def cache_content(cache):
    """Everything stored in a cache, tokens not yet advanced over included."""
    return len(cache), [content(cache.layer(i)) for i in range(cache.num_layers)]


@contextlib.contextmanager
def refuses(error, holder=None, match=None):
    """The block raises ``error``, a KvedgeError with a useful message, and changes nothing.

    ``holder`` is the layer or cache whose length and stored bytes must stay as they are.
    """
    look = cache_content if isinstance(holder, kvedge.KVCache) else content
    before = None if holder is None else look(holder)
    try:
        yield
    except error as caught:
        assert isinstance(caught, errors.KvedgeError), f"{caught!r} is no KvedgeError"
        message = str(caught)
        assert len(message) > 10, f"message says nothing: {message!r}"
        for word in [match] if isinstance(match, str) else match or []:
            assert word in message, f"{word!r} is missing in: {message}"
    else:
        raise AssertionError(f"did not raise {error}")
    if holder is not None:
        assert look(holder) == before, "a refused call changed what is stored"


# ------------------------------------------------------------------------------------------------
# Threads


def run_together(*jobs):
    """Run every job in a thread of its own; the first exception of any is raised here."""
    failures = []

    def guarded(job):
        try:
            job()
        except BaseException as error:  # raised again below
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive(), "a thread hangs"
    if failures:
        raise failures[0]


def rows_of_positions(first, n):
    """Values (n, 1, 8) of tokens from `first` on: each is its token's position."""
    return np.repeat(np.arange(first, first + n, dtype=np.float32)[:, None, None], 8, axis=2)


def read_positions_beside(write, values, attend, taken_back=0):
    """Two readers beside a writer of such values: each sees those, a prefix and all of it.

    ``values()`` gives all (tokens, channels), ``attend()`` their mean, as a query of zeros has it.
    Between two reads the tokens may have become fewer, by `taken_back` at most.
    """
    done = threading.Event()

    def write_to_the_end():
        try:
            write()
        finally:
            done.set()

    def read_on():
        while not done.is_set():
            got, mean = values(), attend()
            first, last = (len(got) - taken_back - 1) / 2, (len(values()) + taken_back - 1) / 2
            off = np.abs(got - np.arange(len(got))[:, None]).max()
            assert off <= 0.01 * len(got) + 0.1, f"{len(got)} tokens: off by {off}"
            assert first - 0.02 * first - 1 <= mean.min() <= mean.max() <= last * 1.02 + 1, (
                f"a mean of {mean.min()}, not {first} to {last}"
            )

    run_together(write_to_the_end, read_on, read_on)


# ------------------------------------------------------------------------------------------------
# Comparisons


def assert_attention_close(out, ref, tolerance=reference.TOLERANCE, hint=""):
    """The numerics contract: max|out - ref| <= tolerance * max|ref|."""
    assert out.dtype == np.float32 and out.shape == ref.shape, (out.dtype, out.shape, ref.shape)
    assert np.isfinite(out).all(), f"not finite {hint}"
    error = np.abs(out.astype(np.float64) - ref).max()
    limit = tolerance * np.abs(ref).max()
    assert error <= limit, f"error {error:.3g} > {limit:.3g} {hint}"


def assert_lse_close(lse, ref, tolerance=5e-4):
    """Logarithms of the softmax denominator; a row that sees nothing has -inf in both."""
    assert lse.dtype == np.float32 and lse.shape == ref.shape, (lse.dtype, lse.shape, ref.shape)
    assert (np.isneginf(lse) == np.isneginf(ref)).all()
    finite = np.isfinite(ref)
    error = np.abs(lse[finite] - ref[finite]) / np.maximum(1, np.abs(ref[finite]))
    assert error.max(initial=0) <= tolerance, f"lse error {error.max():.3g}"


def assert_well_formed(out):
    """Finite, and neither NaN nor denormal, whatever went in."""
    assert np.isfinite(out).all(), "a NaN or an infinity left attention"
    size = np.abs(out)
    denormal = (size > 0) & (size < np.finfo(np.float32).tiny)
    assert not denormal.any(), f"{denormal.sum()} denormal numbers left attention"
