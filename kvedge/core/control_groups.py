"""The control groups that this process is in, and what their files say: limits of containers.

Where a group lies is said by /proc/self/cgroup (its path, for each controller) and
/proc/self/mountinfo (where hierarchies are mounted, and which part of them): proc_pid_mountinfo(5),
cgroups(7).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

__all__ = ["read", "settings"]


class _Mount(NamedTuple):
    version: int
    root: str  # the group that is mounted; "/": the uppermost that this process sees
    folder: Path


def settings(base: Path, controller: str, version_2: str, version_1: str) -> Iterator[list[str]]:
    """Tell what a setting is in every control group of this process, from its own to the uppermost.

    Groups nest, and the tightest limit on the way up holds.

    Parameters
    ----------
    base : Path
        Where ``proc`` and ``sys`` are found.
    controller : str
        Such as ``"cpu"``.
    version_2, version_1 : str
        The files of the setting in each version of control groups; several with spaces between.

    Yields
    ------
    list of str
        The words of these files. Groups that do not have them are left out.
    """
    paths = _paths(base, controller)
    for mount in _mounts(base, controller):
        files = (version_1 if mount.version == 1 else version_2).split()
        for group in _upwards(paths.get(mount.version, mount.root), mount.root):
            folder = mount.folder / group
            if words := " ".join(read(folder / file) for file in files).split():
                yield words


def read(path: Path) -> str:
    """Return what a small file says; nothing where it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _paths(base: Path, controller: str) -> dict[int, str]:
    """The group of this process in each version: ``0::/box``, ``4:cpu,cpuacct:/docker/ab``."""
    paths = {}
    for line in read(base / "proc/self/cgroup").splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0" and not controllers:
            paths[2] = path
        elif controller in controllers.split(","):
            paths[1] = path
    return paths


def _mounts(base: Path, controller: str) -> list[_Mount]:
    """Where hierarchies with the controller are mounted; where nothing tells, the usual places."""
    mounts = []
    for line in read(base / "proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")  # "30 25 0:26 / /sys/fs/cgroup rw shared:4", ...
        fields, kinds = left.split(" "), right.split(" ")  # ... "cgroup cgroup rw,cpu"
        if len(fields) < 5 or kinds[0] not in ("cgroup", "cgroup2"):
            continue
        if kinds[0] == "cgroup2" or controller in kinds[-1].split(","):
            root, place = map(_unescaped, fields[3:5])
            mounts.append(_Mount(1 if kinds[0] == "cgroup" else 2, root, base / place.lstrip("/")))
    if not mounts:
        usual = base / "sys/fs/cgroup"
        named = [folder for folder in usual.glob("*") if controller in folder.name.split(",")]
        mounts = [_Mount(2, "/", usual), *(_Mount(1, "/", folder) for folder in named)]
    return mounts


def _unescaped(path: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), path)


def _upwards(path: str, root: str) -> list[PurePosixPath]:
    """The group of that path and those above it, as folders below where `root` is mounted.

    A path that does not lie in `root`, or lies outside of the namespace (``/../box``), is the
    host's: what a container sees of its own group is the root.
    """
    inside = path == root or path.startswith(root.rstrip("/") + "/")
    group = PurePosixPath(path[len(root.rstrip("/")) :].lstrip("/") if inside else "")
    if ".." in group.parts:
        group = PurePosixPath()
    return [group, *group.parents]
