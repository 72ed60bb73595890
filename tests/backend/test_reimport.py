"""kvedge imported a second time in one process, as reloaders do: whole, in part, or reloaded."""

import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.subprocess

# How a process comes to a second import.
WAYS = {
    "all": "drop(lambda name: True)",
    "the package alone": "drop(lambda name: name == 'kvedge')",
    "the package and its errors": "drop(lambda name: name in ('kvedge', 'kvedge.errors'))",
    "the package and its core": "drop(lambda name: name == 'kvedge' or '.core' in name)",
    "all but the backends": "drop(lambda name: 'backends' not in name)",
    "the backends": "drop(lambda name: name == 'kvedge' or 'backends' in name)",
    "twice": "drop(lambda name: True); import kvedge; drop(lambda name: True)",
    "reload": "importlib.reload(kvedge)",
    "reload of the registry": "importlib.reload(sys.modules['kvedge.core.registry'])",
}

SCRIPT = """
    import copy, gc, importlib, pickle, sys, weakref
    import numpy as np
    import kvedge

    def drop(chosen):
        for name in [name for name in sys.modules if name.partition(".")[0] == "kvedge"]:
            if chosen(name):
                del sys.modules[name]

    rows = np.arange(64, dtype=np.float32).reshape(2, 4, 8) / 64

    def filled():
        cache = kvedge.KVCache(2, 4, 8)
        for layer in range(2):
            cache.append(layer, rows, rows)
        cache.advance(2)
        return cache

    old, old_errors = filled(), kvedge.KvedgeError
    data = pickle.dumps(old)
    expected = old.attend(0, rows[0])
    {way}
    import kvedge
    from kvedge import errors
    from kvedge.layer import types as layer_types

    def check():
        cache = filled()
        layer = kvedge.QuantizedKvLayer(8, 4, 8)
        layer.extend(rows, rows)
        heads = kvedge.MultiHeadKvCache(2, kvedge.KvCacheConfig(32, 4))
        snapshot = cache.snapshot().detach()
        for made in (cache, layer, heads, snapshot):
            for other in (pickle.loads(pickle.dumps(made)), copy.copy(made), copy.deepcopy(made)):
                assert type(other) is type(made) and isinstance(other, type(made)), other
        assert isinstance(cache.layer(0), kvedge.QuantizedKvLayer)
        assert type(pickle.loads(data)) is kvedge.KVCache
        for found in (pickle.loads(data), copy.copy(cache), old, old.copy()):
            np.testing.assert_array_equal(found.attend(0, rows[0]), expected)
        paged = kvedge.PagedKvCache(kvedge.KvBlockPool(4, 4, 2, 4, 8))
        seq = paged.from_kv_cache(cache)
        np.testing.assert_allclose(paged.attend(seq, 0, rows[0]), expected, atol=1e-6)
        kvedge.attend_batch([layer], rows[:1])
        kvedge.append_batch([layer], rows[:1], rows[:1])
        kvedge.KvCachePolicy(1 << 20).new_cache(2, 4, 8)
        kvedge.Fp8KvLayer(4, 1, 8)

        assert kvedge.KvedgeError is errors.KvedgeError
        for call in (
            lambda: cache.attend(0, rows[0, :3]),
            lambda: cache.append(0, rows[:, :1], rows),
            lambda: layer.push(rows[0] * np.nan, rows[0]),
            lambda: layer.attend(rows[0], window=-1),
            lambda: cache.truncate(9),
            lambda: kvedge.attend_batch([layer], rows[0, :, :3]),
            lambda: paged.attend(99, 0, rows[0]),
            lambda: kvedge.KVCache(0, 1, 1),
        ):
            try:
                call()
            except kvedge.KvedgeError as error:
                assert type(error) is getattr(kvedge, type(error).__name__)
                assert type(pickle.loads(pickle.dumps(error))) is type(error)
            else:
                raise AssertionError("nothing was raised")

    check()
    print(kvedge.backend)
"""


@pytest.mark.parametrize("way", WAYS)
def test_a_second_import_is_whole(way):
    script = textwrap.dedent(SCRIPT).replace("{way}", WAYS[way])
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_an_import_that_failed_can_be_made_again():
    script = """
        import os
        os.environ["KVEDGE_BACKEND"] = "none"
        try:
            import kvedge
        except ImportError as error:
            failed = error
        os.environ["KVEDGE_BACKEND"] = "numpy"
        import kvedge
        assert not isinstance(failed, kvedge.BackendUnavailableError)
        kvedge.KVCache(1, 1, 8).copy()
        print(kvedge.backend)
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True
    )
    assert result.stdout == "numpy\n", result.stderr
