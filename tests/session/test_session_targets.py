"""What a file may take the place of: found out by every writer before anything is computed."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
import sys
import textwrap

import pytest
from session_support import filled_cache, run
from support import cache_content

from kvedge import KvBlockPool, KVCache, KvCacheConfig, MultiHeadKvCache, PagedKvCache, errors
from kvedge.bench.report import save_report
from kvedge.cache.state import CacheState
from kvedge.files import replacing

pytestmark = pytest.mark.skipif(os.name != "posix", reason="files of POSIX")
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux")
as_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs the rights of root"
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "session.safetensors"


# ---- every writer, every kind of target ----------------------------------------------------------


def _sequence():
    paged = PagedKvCache(KvBlockPool(2, 4, 1, 1, 8))
    paged.new_sequence()
    return paged


WRITERS = {
    "cache": lambda path: KVCache(1, 1, 8).save(path),
    "pool": lambda path: _sequence().save(path),
    "sequence": lambda path: (paged := _sequence()).swap_out(paged.sequences[0], path),
    "multi-head": lambda path: MultiHeadKvCache(2, KvCacheConfig(32, 4)).save(path),
    "report": lambda path: save_report({"format": 1}, path),
}


def _folder(path):
    path.mkdir()


def _fifo(path):
    os.mkfifo(path)


def _socket(path):
    folder = os.getcwd()
    os.chdir(path.parent)  # names of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(path.name)
    finally:
        os.chdir(folder)


TARGETS = {
    "folder": (_folder, "a folder"),
    "pipe": (_fifo, "a pipe"),
    "socket": (_socket, "a socket"),
    "link to a device": (lambda path: path.symlink_to("/dev/null"), "a device"),
    "link to itself": (lambda path: path.symlink_to(path.name), "symbolic links"),
    "link to a pipe": (lambda path: (_fifo(f"{path}.p"), path.symlink_to(f"{path}.p")), "a pipe"),
}


def _state(folder):
    """What is in a folder: names, and what each is, but for the time it was looked at."""
    found = {name: os.lstat(folder / name) for name in os.listdir(folder)}
    return {name: (*status[:7], status.st_mtime_ns) for name, status in found.items()}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("writer", WRITERS)
def test_what_is_no_regular_file_is_refused_and_stays(writer, target, path):
    make, what = TARGETS[target]
    make(path)
    before = _state(path.parent)
    with pytest.raises(OSError, match=what) as caught:
        WRITERS[writer](path)
    assert str(path) in str(caught.value)
    assert _state(path.parent) == before


@pytest.mark.parametrize("writer", WRITERS)
def test_links_stay_links_and_what_they_lead_to_is_written(writer, path, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    path.symlink_to(folder / "there")
    for _ in range(2):  # a link to nothing, and to the file of before
        WRITERS[writer](path)
        assert path.is_symlink() and os.listdir(folder) == ["there"]


@pytest.mark.parametrize("name", ["", "folder/", "folder/.", "new/", "a\0b", 3, None])
@pytest.mark.parametrize("writer", WRITERS)
def test_what_names_no_file_is_refused(writer, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises((errors.InvalidArgumentError, IsADirectoryError)):
        WRITERS[writer](name)
    assert os.listdir(tmp_path) == ["folder"]


@pytest.mark.parametrize("name", [b"s.kv", "s.kv"])
def test_a_path_may_be_bytes(name, path, rng, monkeypatch):
    monkeypatch.chdir(path.parent)
    filled_cache(rng).save(name)
    assert os.listdir(path.parent) == ["s.kv"]


@pytest.mark.parametrize("name", ["x" * 255, "ü" * 127, "𝄞" * 63])
def test_a_name_may_be_as_long_as_the_system_allows(name, path, rng):
    for _ in range(2):
        filled_cache(rng).save(path.parent / name)
    assert os.listdir(path.parent) == [name]
    with pytest.raises(OSError, match="too long"):
        filled_cache(rng).save(path.parent / (name + "x" * 5))


@linux
def test_the_name_of_an_open_file_is_refused(path, rng):
    """``/dev/stdout > f`` is f for the system: saving would put another file in its place."""
    cache = filled_cache(rng)
    with open(path, "wb") as file:
        number = file.fileno()
        (link := path.parent / "link").symlink_to(f"/dev/fd/{number}")
        for name in (f"/dev/fd/{number}", f"/proc/self/fd/{number}", link):
            with pytest.raises(OSError, match="open file"):
                cache.save(name)
        assert os.fstat(number).st_ino == path.stat().st_ino and path.stat().st_size == 0


def test_it_is_found_out_before_anything_is_computed(path, rng, monkeypatch):
    os.mkfifo(path)
    monkeypatch.setattr("kvedge.files.header.digest", None)
    monkeypatch.setattr(CacheState, "contents", None)
    monkeypatch.setattr(PagedKvCache, "to_kv_cache", None)
    monkeypatch.setattr("kvedge.paged.file.save", None)
    monkeypatch.setattr(MultiHeadKvCache, "_state", None)
    for write in WRITERS.values():
        with pytest.raises(OSError, match="pipe"):
            write(path)


def test_a_check_leaves_no_trace(path, rng):
    replacing.check_target(path)
    assert os.listdir(path.parent) == []
    filled_cache(rng).save(path)
    before = _state(path.parent)
    replacing.check_target(path)
    assert _state(path.parent) == before
    with pytest.raises(FileNotFoundError, match="no folder"):
        replacing.check_target(path.parent / "none" / "file")


# ---- folders -------------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_one_is_refused_before(tmp_path):
    replacing.check_folder(tmp_path / "new" / "newer")
    replacing.check_folder(tmp_path)
    for name, (make, _) in TARGETS.items():
        if name == "folder":
            continue
        make(tmp_path / name)
        with pytest.raises(OSError):
            replacing.check_folder(tmp_path / name)
        with pytest.raises(OSError):
            replacing.check_folder(tmp_path / name / "within")
        with pytest.raises(OSError):
            replacing.check_folder(tmp_path, name)
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".tmp")]


# ---- mounts, owners, rights ----------------------------------------------------------------------


@linux
@pytest.mark.subprocess
@as_root
def test_a_file_that_is_a_mount_point_is_refused_at_the_start(path, rng):
    name = path.parent / "a b\\c"
    cache = filled_cache(rng)
    cache.save(name)
    mount = 'mount --bind "$2" "$2" && '
    script = """
        import sys, kvedge
        from kvedge.files import replacing
        cache = kvedge.KVCache.load(sys.argv[1])
        kvedge.files.header.digest = None
        for write in (replacing.check_target, cache.save):
            try:
                write(sys.argv[1])
            except OSError as error:
                print(error)
    """
    command = ["unshare", "-m", "sh", "-c"]
    if not shutil.which("unshare") or subprocess.call([*command, f"{mount} true", "sh", "", name]):
        pytest.skip("no mounts here")
    result = subprocess.run(
        [
            *command,
            mount + '"$1" -c "$3" "$2"',
            "sh",
            sys.executable,
            name,
            textwrap.dedent(script),
        ],
        capture_output=True,
        text=True,
    )
    assert result.stdout.count("it is a mount point") == 2, result.stdout + result.stderr
    assert cache_content(KVCache.load(name)) == cache_content(cache)
    assert os.listdir(path.parent) == [name.name]


@as_root
@pytest.mark.parametrize("mode", [0o600, 0o664, 0o640])
@pytest.mark.parametrize("writer", WRITERS)
def test_owner_group_and_mode_of_an_old_file_stay(writer, mode, path):
    path.touch()
    path.chmod(mode)
    os.chown(path, 1234, 4321)
    WRITERS[writer](path)
    found = path.stat()
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (1234, 4321, mode)
    assert found.st_size > 0


@as_root
@pytest.mark.subprocess
def test_root_removes_what_it_left_behind_in_the_name_of_another(path, rng):
    path.touch()
    os.chown(path, 1234, 4321)
    left = path.parent / f".{path.name}.{'0' * 16}.tmp"
    left.touch()
    os.chown(left, 1234, 4321)
    filled_cache(rng).save(path)
    assert os.listdir(path.parent) == [path.name]


AS_USER = """
    import os, sys, numpy as np, kvedge
    from kvedge.files import replacing
    cache = kvedge.KVCache(1, 1, 8)
    kvedge.files.header.digest({}, {})
    os.setgroups([]), os.setgid(2000), os.setuid(2000)
    try:
        replacing.check_target(sys.argv[1])
        cache.save(sys.argv[1])
    except OSError as error:
        print(type(error).__name__, error)
    else:
        print("saved")
"""


@as_root
@pytest.mark.subprocess
@pytest.mark.parametrize(
    ("owner", "mode", "folder", "expected"),
    [
        (2000, 0o600, 0o777, "saved"),
        (2000, 0o400, 0o777, "PermissionError"),  # read-only is meant
        (1234, 0o644, 0o777, "PermissionError"),
        (1234, 0o666, 0o777, "cannot be given to user 1234, group 4321"),
        (1234, 0o666, 0o1777, "cannot be given to user 1234"),  # sticky
        (2000, 0o600, 0o555, "no new file can be made in"),
        (None, 0, 0o555, "no new file can be made in"),
    ],
)
def test_what_a_user_may_not_replace_is_refused(owner, mode, folder, expected, path):
    for above in list(path.parents)[1:]:  # pytest's own are for root alone
        if stat.S_IMODE(above.stat().st_mode) & 0o5 != 0o5:
            above.chmod(0o755)
    path.parent.chmod(folder)
    if owner is not None:
        path.write_text("old")
        path.chmod(mode)
        os.chown(path, owner, 4321 if owner == 1234 else 2000)
    before = _state(path.parent)
    result = run(AS_USER, path)
    assert expected in result.stdout, result.stdout + result.stderr
    if expected == "saved":
        found = path.stat()
        assert (found.st_uid, stat.S_IMODE(found.st_mode)) == (owner, mode)
    else:
        assert str(path) in result.stdout and _state(path.parent) == before


@linux
@as_root
@pytest.mark.parametrize("flag", ["i", "a"])
def test_an_immutable_file_is_refused_at_the_start(flag, path):
    path.write_text("old")
    if not shutil.which("chattr") or subprocess.call(["chattr", f"+{flag}", path]):
        pytest.skip("no immutable files here")
    try:
        with pytest.raises(PermissionError, match="cannot be written"):
            replacing.check_target(path)
        assert os.listdir(path.parent) == [path.name]
    finally:
        subprocess.call(["chattr", f"-{flag}", path])


def test_other_names_of_a_file_keep_the_old_content(path, rng):
    filled_cache(rng).save(path)
    os.link(path, other := path.parent / "other")
    before = other.read_bytes()
    filled_cache(rng, 20).save(path)
    assert other.read_bytes() == before and len(KVCache.load(path)) == 20
