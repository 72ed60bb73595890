"""Saving when things go wrong: a killed process, a full disk, no memory. The old file stays."""

from __future__ import annotations

import mmap
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time

import pytest
from session_support import filled_cache, run
from support import cache_content

from kvedge import KVCache, errors

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux")
needs_locks = pytest.mark.skipif(sys.platform == "win32", reason="needs fcntl")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "session.safetensors"


def leftovers(path):
    """The temporary files beside a path, of kvedge or of anything else that it used."""
    return sorted(name for name in os.listdir(path.parent) if name != path.name)


# ---- crashes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["write", "fsync", "rename", "interrupt"])
def test_a_failed_save_leaves_the_old_file(path, rng, monkeypatch, step):
    filled_cache(rng).save(path)
    before = path.read_bytes()

    def fail(*args, **kwargs):
        raise KeyboardInterrupt if step == "interrupt" else OSError(28, "No space left on device")

    class Full:
        def __init__(self, *args):
            self.file = open(*args)  # noqa: SIM115

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.file.close()

        def write(self, data):
            fail()

    where, name = {
        "write": ("kvedge.files.replacing", "open"),
        "fsync": ("os", "fsync"),
        "rename": ("os", "replace"),
        "interrupt": ("os", "fsync"),
    }[step]
    monkeypatch.setattr(f"{where}.{name}", Full if step == "write" else fail, raising=False)
    cache = filled_cache(rng, 20)
    with pytest.raises(KeyboardInterrupt if step == "interrupt" else OSError):
        cache.save(path)
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_a_save_is_synced_before_it_is_renamed(path, rng, monkeypatch):
    calls = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda *args, real=real, name=name: (calls.append(name), real(*args))
        )
    filled_cache(rng).save(path)
    assert calls[:2] == ["fsync", "replace"]
    if os.name == "posix":
        assert calls == ["fsync", "replace", "fsync"]  # the last for the folder


@pytest.mark.subprocess
@pytest.mark.skipif(sys.platform == "win32", reason="needs limits on file sizes")
def test_a_full_disk_is_an_os_error_and_leaves_the_old_file(path, rng):
    cache = filled_cache(rng)
    cache.save(path)
    script = """
        import os, resource, sys, kvedge
        cache = kvedge.KVCache.load(sys.argv[1])
        folder = os.path.dirname(sys.argv[1])
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
        try:
            cache.save(sys.argv[1])
        except OSError as error:
            print(os.listdir(folder), error)
    """
    result = run(script, path)
    assert result.stdout.startswith(f"['{path.name}'] "), result.stdout + result.stderr
    assert str(path) in result.stdout
    assert cache_content(KVCache.load(path)) == cache_content(cache)


# ---- killed --------------------------------------------------------------------------------------

SAVER = """
    import sys, numpy as np, kvedge
    caches, num_states = [], int(sys.argv[2])
    for tokens in (2000, 3000):
        arrays = [np.full((64, 64, 64), tokens, np.float32) for _ in range(num_states)]
        states = [kvedge.StateLayer({"state": array}) for array in arrays]
        cache = kvedge.KVCache(layers=[{}, {}, *states], num_kv_heads=4, head_dim=64)
        kv = np.full((tokens, 4, 64), tokens, np.float32)
        for i in range(2):
            cache.append(i, kv, kv)
        for i in range(num_states):
            cache.replace(2 + i, tokens)
        cache.advance(tokens)
        caches.append(cache)
    caches[0].save(sys.argv[1])
    print("ready", flush=True)
    while True:
        for cache in caches:
            cache.save(sys.argv[1])
"""

# Goes as far as the bytes of the file and stops there, so that a kill is in the midst of a save.
HALF_WAY = """
    import sys, time, numpy as np, kvedge
    from kvedge.files import replacing
    cache = kvedge.KVCache(1, 1, 8)
    kv = np.ones((500, 1, 8), np.float32)
    cache.append(0, kv, kv)
    cache.advance(500)

    class Slow:
        def __init__(self, *args):
            self.file = open(*args)
        def __enter__(self):
            return self
        def __exit__(self, *error):
            self.file.close()
        def write(self, data):
            self.file.write(data)
        def flush(self):
            self.file.flush()
            print("half way", flush=True)
            sys.stdin.readline()

    replacing.open = Slow
    cache.save(sys.argv[1])
    print("saved", flush=True)
"""


def start(script, path, *args):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), str(path), *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def kill_half_way(path):
    with start(HALF_WAY, path) as process:
        assert process.stdout.readline() == "half way\n"
        process.kill()


def assert_whole(path):
    """The path holds one of the two caches that SAVER saves, all of it."""
    cache = KVCache.load(path)
    assert len(cache) in (2000, 3000)
    for i in range(2):
        assert (cache.k(i) == len(cache)).all() and (cache.v(i) == len(cache)).all()
    for i in range(2, cache.num_layers):
        assert (cache.layer(i).arrays["state"] == len(cache)).all()


def kill_saves(path, rng, times, num_states="0"):
    """Kill a process that saves over and over, at a random moment, so many times."""
    kept = set()
    for _ in range(times):
        with start(SAVER, path, num_states) as process:
            assert process.stdout.readline() == "ready\n"
            time.sleep(rng.uniform(0.0, 0.03))
            process.send_signal(signal.SIGKILL)
        if path.exists():
            assert_whole(path)
        found = leftovers(path)
        assert len(found) <= 1 and not kept & set(found), "an older leftover was not removed"
        kept.update(found)
    return kept


@pytest.mark.subprocess
@needs_locks
@pytest.mark.parametrize("num_states", ["0", "3"])
def test_a_killed_save_leaves_a_whole_file(path, rng, num_states):
    filled_cache(rng).save(path)
    with start(SAVER, path, num_states) as process:
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.1)
        process.kill()
    kill_saves(path, rng, 5, num_states)
    filled_cache(rng).save(path)
    assert leftovers(path) == []


@pytest.mark.slow
@pytest.mark.subprocess
@needs_locks
@pytest.mark.parametrize("num_states", ["0", "3"])
def test_two_hundred_killed_saves_leave_a_whole_file(path, rng, num_states):
    kept = kill_saves(path, rng, 220, num_states)
    assert len(kept) > 20, "hardly any kill was in the midst of a save"
    filled_cache(rng).save(path)
    assert leftovers(path) == []


@pytest.mark.subprocess
@needs_locks
def test_the_next_save_removes_what_a_killed_one_left(path, rng):
    filled_cache(rng).save(path)
    path.chmod(0o640)
    before = path.read_bytes()
    kill_half_way(path)
    (left,) = leftovers(path)
    assert re.fullmatch(r"\.session\.safetensors\.[0-9a-f]{16}\.tmp", left)
    assert stat.S_IMODE((path.parent / left).stat().st_mode) == 0o600, "others may read it"
    assert path.read_bytes() == before
    cache = filled_cache(rng, 20)
    cache.save(path)
    assert leftovers(path) == []
    assert cache_content(KVCache.load(path)) == cache_content(cache)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


@pytest.mark.subprocess
@needs_locks
def test_a_save_of_another_process_is_not_disturbed(path, rng):
    cache = filled_cache(rng)
    with start(HALF_WAY, path) as process:
        assert process.stdout.readline() == "half way\n"
        (its,) = leftovers(path)
        for _ in range(3):
            cache.save(path)
            assert leftovers(path) == [its]
        assert cache_content(KVCache.load(path)) == cache_content(cache)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "saved\n"
    assert len(KVCache.load(path)) == 500
    assert leftovers(path) == []


@pytest.mark.subprocess
@needs_locks
def test_only_leftovers_of_the_same_name_are_removed(path, rng, tmp_path):
    kill_half_way(path)
    assert len(leftovers(path)) == 1
    digits = "0123456789abcdef"
    others = [
        f".other.safetensors.{digits}.tmp",
        f".session.safetensors.{digits[:-1]}.tmp",
        f".session.safetensors.{digits.upper()}.tmp",
        f".session.safetensors.{digits}.tmp~",
        f"session.safetensors.{digits}.tmp",
        ".session.safetensors.tmp",
        f".sessionXsafetensors.{digits}.tmp",
    ]
    for name in others:
        (tmp_path / name).write_text("mine")
    folder = tmp_path / f".session.safetensors.{digits}.tmp"
    folder.mkdir()
    target = tmp_path / "precious"
    target.write_text("mine")
    link, twin = (tmp_path / f".session.safetensors.{d * 16}.tmp" for d in "12")
    link.symlink_to(target)
    os.link(target, twin)  # another name of the same file
    pipe = tmp_path / f".session.safetensors.{'3' * 16}.tmp"
    os.mkfifo(pipe)
    stranger = tmp_path / f".session.safetensors.{'4' * 16}.tmp"
    stranger.write_text("another user's")
    strangers = [stranger]
    if os.geteuid() == 0:
        os.chown(stranger, 12345, 12345)
    else:
        stranger.unlink()
        strangers = []
    everything = {*others, folder.name, target.name, link.name, twin.name, pipe.name}
    everything |= {file.name for file in strangers}
    cache = filled_cache(rng)
    cache.save(path)
    assert set(leftovers(path)) == everything
    assert target.read_text() == "mine" and link.is_symlink()
    assert cache_content(KVCache.load(path)) == cache_content(cache)


@pytest.mark.parametrize("lacks", ["the system", pytest.param("the files", marks=needs_locks)])
def test_without_locks_nothing_is_removed(lacks, path, rng, monkeypatch):
    def refuse(descriptor, operation):
        raise OSError(95, "Operation not supported")

    left = path.parent / f".{path.name}.{'0' * 16}.tmp"
    left.write_text("of a killed process")
    if lacks == "the system":
        monkeypatch.setattr("kvedge.files.replacing.fcntl", None)
    else:
        monkeypatch.setattr("fcntl.flock", refuse)
    cache = filled_cache(rng)
    cache.save(path)
    assert leftovers(path) == [left.name]
    assert cache_content(KVCache.load(path)) == cache_content(cache)


@needs_locks
def test_many_threads_may_save_to_one_path(path, rng):
    """Each finds the files of the others, some not locked yet; none is lost, none is left."""
    caches = [filled_cache(rng, tokens) for tokens in (5, 9)]
    failed = []

    def save(cache):
        try:
            for _ in range(60):
                cache.save(path)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=save, args=(caches[i % 2],)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert leftovers(path) == []
    assert len(KVCache.load(path)) in (5, 9)


@needs_locks
def test_a_long_name_can_be_saved_to(tmp_path, rng):
    for name in ("x" * 255, "é" * 127):
        path = tmp_path / name
        cache = filled_cache(rng)
        for _ in range(2):
            cache.save(path)
        assert cache_content(KVCache.load(path)) == cache_content(cache)
        assert leftovers(path) == []
        path.unlink()


# ---- full and read-only --------------------------------------------------------------------------

MOUNTED = """
    import os, resource, subprocess, sys, numpy as np, kvedge
    folder, options, again = sys.argv[1:]
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder]
    if subprocess.run(mount, capture_output=True).returncode:
        print("no mount")
        sys.exit()
    path = os.path.join(folder, "session")

    def filled(tokens):
        cache = kvedge.KVCache(2, 4, 64)
        kv = np.full((tokens, 4, 64), tokens, np.float32)
        for i in range(2):
            cache.append(i, kv, kv)
        cache.advance(tokens)
        return cache

    filled(100).save(path)
    if again and subprocess.run(["mount", "-o", again, folder], capture_output=True).returncode:
        print("no mount")
        sys.exit()
    before = open(path, "rb").read()
    for _ in range(3):
        try:
            filled(3000).save(path)
        except OSError as error:
            print(error.errno, os.listdir(folder), error)
        assert open(path, "rb").read() == before
    assert len(kvedge.KVCache.load(path)) == 100
"""


def save_on(folder, options, again=""):
    """Save to a file system of its own, in a name space of its own; what the child printed."""
    if not shutil.which("unshare") or os.geteuid() != 0:
        pytest.skip("needs root and unshare to mount a file system")
    command = ["unshare", "-m", sys.executable, "-c", textwrap.dedent(MOUNTED), folder, options]
    done = subprocess.run(
        [*command, again], capture_output=True, text=True, timeout=60, check=False
    )
    if "no mount" in done.stdout or done.stderr.startswith("unshare:"):
        pytest.skip(f"mounting is refused: {done.stdout}{done.stderr}")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@linux
@pytest.mark.subprocess
def test_a_full_file_system_is_an_os_error_and_leaves_the_old_file(tmp_path):
    lines = save_on(str(tmp_path), "size=1m")
    assert len(lines) == 3
    for line in lines:
        assert line.startswith("28 ['session'] ") and "No space left" in line, line
        assert "session" in line.partition("]")[2]


@linux
@pytest.mark.subprocess
def test_a_read_only_file_system_is_an_os_error_and_leaves_the_old_file(tmp_path):
    lines = save_on(str(tmp_path), "size=8m", "remount,ro")
    assert len(lines) == 3
    for line in lines:
        assert line.startswith("30 ['session'] ") and "Read-only" in line, line


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may do all")
def test_a_read_only_folder_is_a_permission_error(path, rng):
    cache = filled_cache(rng)
    cache.save(path)
    before = path.read_bytes()
    path.parent.chmod(0o500)
    try:
        with pytest.raises(PermissionError):
            cache.save(path)
    finally:
        path.parent.chmod(0o700)
    assert path.read_bytes() == before and leftovers(path) == []


def test_a_file_cut_just_before_it_is_mapped_is_corrupt(tmp_path, rng, monkeypatch):
    """What the mapping lacks would end the process, once it is read."""
    path = tmp_path / "cache"
    filled_cache(rng, 200).save(path)

    class OfHalf(mmap.mmap):
        def __new__(cls, *arguments, **options):
            os.truncate(path, path.stat().st_size // 2)
            return super().__new__(cls, *arguments, **options)

    monkeypatch.setattr(mmap, "mmap", OfHalf)
    with pytest.raises(errors.CorruptFileError, match="it was cut while being read"):
        KVCache.load(path, mmap=True)
