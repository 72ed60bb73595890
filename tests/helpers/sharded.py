"""Random traces of calls on a cache, run on one cache and on a context over several ranks."""

from __future__ import annotations

import numpy as np
import reference
from support import assert_lse_close, normal

from kvedge import KVCache
from kvedge.cache.cache import state_of
from kvedge.distributed import ShardedKVCache
from kvedge.errors import KvedgeError


def options_of(spec, length):
    """The options of an attend call, by what Hypothesis drew for it."""
    rng = np.random.default_rng(spec["seed"])
    heads, rows = spec["num_heads"], spec["rows"]
    options = {"causal": spec["causal"]}
    for name in ("scale", "softcap", "precision_bits"):
        if spec.get(name) is not None:
            options[name] = spec[name]
    if spec["causal"] and spec["window"] is not None:
        options["window"] = spec["window"]
        options["sink_tokens"] = spec["sink_tokens"]
    if spec["start"]:
        options["start"] = min(spec["start"], length)
    if spec["alibi"]:
        options["alibi_slopes"] = rng.uniform(0, 0.5, heads).astype(np.float32)
    if spec["sink_logits"]:
        options["sink_logits"] = normal(rng, heads)
    shape = [(length,), (1, rows, length), (heads, rows, length), (heads, 1, length)]
    shape = shape[spec["seed"] % 4]
    if spec["mask"] == "bool":
        options["mask"] = rng.random(shape) < spec["density"]
    elif spec["mask"] == "bias":
        options["mask"] = normal(rng, *shape)
        options["mask"][rng.random(shape) > spec["density"]] = -np.inf
    return options


def for_reference(options):
    return {name: value for name, value in options.items() if name != "precision_bits"}


def new_cache(trace):
    """The empty cache that a trace begins with."""
    layers, heads, dim, value_dim = trace["shape"]
    options = dict(trace["storage"])
    rng = np.random.default_rng(trace["seed"])
    if options.get("group_size"):
        options["group_size"] = min(options["group_size"], dim, value_dim)
    if options.get("key_offset") == "given":
        options["key_offset"] = 3 * normal(rng, layers, heads, dim)
    if options.get("key_scale") == "given":
        options["key_scale"] = np.exp(normal(rng, layers, heads, dim))
    return KVCache(layers, heads, dim, value_head_dim=value_dim, **options)


def run_trace(cache, trace):
    """Run a trace; returns a result for each call, and the bytes held at the end."""
    layers, heads, dim, value_dim = trace["shape"]
    rng = np.random.default_rng(trace["seed"] + 1)
    bias = 20 * normal(rng, heads, dim)  # a few large channels, for what is automatic
    marks, results = [], []
    ends = [len(cache)] * layers
    for call, *arguments in trace["calls"]:
        result = None
        try:
            if call == "append":
                n, ahead = arguments
                keys = normal(rng, layers, n, heads, dim) + bias
                values = normal(rng, layers, n, heads, value_dim)
                if ends == [len(cache)] * layers:
                    for i in range(layers):
                        cache.append(i, keys[i], values[i])
                        ends[i] += n
                    if ahead:  # one layer is given its next tokens before the others
                        cache.append(0, keys[0][:1], values[0][:1])
                        ends[0] += 1
                    cache.advance(n)
            elif call == "step":
                keys = normal(rng, layers, heads, dim) + bias
                cache.push_step(keys, normal(rng, layers, heads, value_dim))
                ends = [len(cache)] * layers
            elif call == "attend":
                spec = arguments[0]
                layer = spec["layer"] % layers
                length = ends[layer]
                rows = min(spec["rows"], length)
                query = normal(rng, spec["rows"], spec["num_heads"], dim)[:rows]
                if length:
                    options = options_of({**spec, "rows": rows}, length)
                    got = cache.attend(layer, query, return_lse=True, **options)
                    if isinstance(cache, KVCache):  # what it should be
                        stored = cache.k(layer), cache.v(layer)
                        got = reference.attention(query, *stored, **for_reference(options))
                    result = got
            elif call == "truncate":
                cache.truncate(int(arguments[0] * len(cache)))
                ends = [len(cache)] * layers
            elif call == "clear":
                cache.clear()
                ends = [0] * layers
            elif call == "snapshot":
                marks.append(cache.snapshot())
            elif call == "detach" and marks:
                mark = marks[arguments[0] % len(marks)]
                # Restored, so few tokens fix what is automatic, which one cache leaves open.
                if len(mark) >= 16 or "auto" not in trace["storage"].values():
                    marks.append(mark.detach())
            elif call == "restore" and marks:
                cache.restore(marks[arguments[0] % len(marks)])
                ends = [len(cache)] * layers
        except KvedgeError as error:
            result = type(error).__name__
        results.append((result, len(cache)))
    return results, state_of(getattr(cache, "part", cache)).contents()


def run_sharded(group, trace):
    """Run a trace on one rank of a group."""
    cache = ShardedKVCache(
        new_cache(trace),
        group,
        block_size=trace["block_size"],
        weights=None if trace["weights"] is None else trace["weights"][: trace["ranks"]],
    )
    return *run_trace(cache, trace), cache.placement


def check_trace(trace, of_ranks):
    """Hold what ranks gave for a trace against one cache, and against float64 attention."""
    expected, contents = run_trace(new_cache(trace), trace)
    first_results = of_ranks[0][0]
    for rank, (results, part, placement) in enumerate(of_ranks):
        assert part.length == placement.count(contents.length, rank)
        for own, of_all in zip(part.layers, contents.layers, strict=True):
            check_bytes(own, of_all, placement.positions(rank, 0, own.num_tokens))
        pairs = zip(results, expected, first_results, strict=True)
        for (got, length), (wanted, whole_length), (first, _) in pairs:
            assert length == whole_length
            if isinstance(wanted, tuple):
                assert np.array_equal(got[0], first[0]), "other bits on another rank"
                assert np.array_equal(got[1], first[1])
                check_attention(got, wanted)
            else:
                assert got == wanted


def check_bytes(own, of_all, positions):
    """A part's layer holds the bytes that one cache holds at some positions."""
    for held, all_held in zip(own.arrays, of_all.arrays, strict=True):
        assert held.tobytes() == all_held[positions].tobytes()
    assert own.key_map.is_same(of_all.key_map)


def check_attention(got, wanted):
    """The numerics contract; what cancels cannot be better than what is summed."""
    limit = reference.TOLERANCE * max(np.abs(wanted[0]).max(), 0.05)
    np.testing.assert_allclose(got[0], wanted[0], rtol=0, atol=limit)
    assert_lse_close(got[1], wanted[1])
