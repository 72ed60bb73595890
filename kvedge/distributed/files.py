"""A context over several ranks as a folder: a file per rank, and a manifest that names them.

    manifest.json                       what was saved, and how its tokens are placed
    {save}-{rank}-of-{ranks}.safetensors    a rank's part, as KVCache.save writes it

A part's file says which save and rank it is of, under metadata names that begin with "kvedge.". A
save writes all parts, then the manifests, then removes the files of earlier saves: so at any moment
there is a whole save, and on machines that have a folder each, a part that is in any manifest is
there.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from kvedge import KVCache
from kvedge.cache.cache import cache_over, state_of
from kvedge.cache.editing import with_turns_stored
from kvedge.cache.state import CacheState
from kvedge.core.checks import checked_path
from kvedge.core.key_map import KeyMap
from kvedge.distributed.first_tokens import check_shareable
from kvedge.distributed.group import Group
from kvedge.distributed.placement import Placement
from kvedge.distributed.share import Share
from kvedge.errors import CorruptFileError, InvalidArgumentError, KvedgeError, RankLostError
from kvedge.files import session
from kvedge.files.replacing import check_folder, replacing

__all__ = ["MANIFEST", "load", "save"]

MANIFEST = "manifest.json"
FORMAT, VERSION = "kvedge-sharded", 1
_OURS = "kvedge."  # prefix of metadata that a part's file has beside the user's
_MOST = 1 << 20  # bytes of a manifest
_PART = re.compile(r"[0-9a-f]{16}-[0-9]+-of-[0-9]+\.safetensors")
_FIELDS = ("save", "number", "length", "max_seq_len", "ranks", "block_size", "pattern")


def _part_name(save: str, rank: int, ranks: int) -> str:
    return f"{save}-{rank}-of-{ranks}.safetensors"


def _together(share: Share, what: str, work: Callable[[], Any]) -> Any:
    """Do what may fail on one rank; if it does, raise on all of them."""
    result, failure = None, None
    try:
        result = work()
    except RankLostError:
        raise
    except Exception as error:
        failure = error
    told = share.tell(None if failure is None else f"{type(failure).__name__}: {failure}"[:1000])
    if failure is not None:
        raise failure
    for rank, text in enumerate(told):
        if text is not None:
            raise KvedgeError(f"rank {rank} could not {what} ({text})")
    return result


# ---- saving --------------------------------------------------------------------------------------


def save(
    part: KVCache,
    share: Share,
    path: str | os.PathLike[str],
    length: int,
    max_seq_len: int | None,
    metadata: Mapping[str, str],
) -> None:
    """Write a context; see :meth:`kvedge.distributed.ShardedKVCache.save`."""
    folder = checked_path(path)
    numbers = share.tell(_number_of(folder))
    number = 1 + max(numbers)
    save_id = share.tell(secrets.token_hex(8))[0]
    name = _part_name(save_id, share.rank, share.size)
    own = {f"{_OURS}save": save_id, f"{_OURS}rank": str(share.rank)}

    def write() -> None:
        reserved = [key for key in metadata if isinstance(key, str) and key.startswith(_OURS)]
        if reserved:
            raise InvalidArgumentError(
                f"metadata names that begin with {_OURS!r} are kvedge's own: {reserved[0]!r}"
            )
        check_folder(folder, MANIFEST)
        os.makedirs(folder, exist_ok=True)
        target = os.path.join(folder, name)
        like = os.path.join(folder, MANIFEST)
        session.save(state_of(part), target, metadata={**metadata, **own}, like=like)

    placement = share.placement
    fields = {
        "format": FORMAT,
        "format_version": VERSION,
        "save": save_id,
        "number": number,
        "length": length,
        "max_seq_len": max_seq_len,
        "ranks": share.size,
        "block_size": placement.block_size,
        "pattern": list(placement.pattern),
        "files": [_part_name(save_id, rank, share.size) for rank in range(share.size)],
    }
    try:
        _together(share, "save its part", write)
    except BaseException:
        with suppress(OSError):
            os.unlink(os.path.join(folder, name))
        raise

    def publish() -> None:
        with replacing(os.path.join(folder, MANIFEST)) as file:
            file.write(json.dumps(fields, indent=1).encode())

    _together(share, "write the manifest", publish)
    with suppress(OSError):
        for other in os.listdir(folder):
            if _PART.fullmatch(other) and not other.startswith(save_id):
                with suppress(OSError):
                    os.unlink(os.path.join(folder, other))


def _number_of(folder: str) -> int:
    """How many saves there were; 0 where there is none that can be read."""
    try:
        return int(_read_manifest(folder)["number"])
    except (OSError, KvedgeError):
        return 0


# ---- loading -------------------------------------------------------------------------------------


def load(
    path: str | os.PathLike[str],
    group: Group,
    block_size: int | None,
    weights: Sequence[float] | None,
) -> tuple[KVCache, Share]:
    """Read this rank's part of a context; see :meth:`kvedge.distributed.ShardedKVCache.load`."""
    folder = checked_path(path)
    # Any placement will do to exchange what the manifests say.
    share = Share(group, Placement(group.size))
    found = share.tell(_together(share, "read the manifest", lambda: _read_manifest(folder)))
    # Where machines have a folder each, a crash may have left one with the manifest before: a part
    # of the newer save is there nonetheless.
    manifest = max(found, key=lambda entry: int(entry["number"]))
    saved = Placement.of_pattern(manifest["ranks"], manifest["block_size"], manifest["pattern"])
    if block_size is None and weights is None and group.size == saved.num_ranks:
        placement = saved
    else:
        blocks = saved.block_size if block_size is None else block_size
        placement = Placement(group.size, block_size=blocks, weights=weights)
    share = Share(group, placement)
    part = _together(share, "load its part", lambda: _assemble(folder, manifest, saved, share))
    return part, share


def _read_manifest(folder: str) -> dict[str, Any]:
    path = os.path.join(folder, MANIFEST)
    with open(path, "rb") as file:
        text = file.read(_MOST + 1)
    try:
        manifest = json.loads(text)
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            raise ValueError("it is not a kvedge-sharded manifest")
        if manifest.get("format_version") != VERSION:
            raise ValueError(
                f"it is of version {manifest.get('format_version')}, and this kvedge reads "
                f"{VERSION}"
            )
        _check_fields(manifest)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CorruptFileError(f"{path}: {error}") from error
    return manifest


def _check_fields(manifest: Mapping[str, Any]) -> None:
    missing = [name for name in _FIELDS if name not in manifest]
    if missing:
        raise ValueError(f"it lacks {', '.join(missing)}")
    if not re.fullmatch("[0-9a-f]{16}", manifest["save"]):
        raise ValueError(f"save must be 16 hex digits, not {manifest['save']!r}")
    for name in ("number", "length", "ranks", "block_size"):
        if type(manifest[name]) is not int or manifest[name] < 0:
            raise ValueError(f"{name} must be a whole number, not {manifest[name]!r}")
    limit = manifest["max_seq_len"]
    if limit is not None and (type(limit) is not int or limit < max(1, manifest["length"])):
        raise ValueError(f"max_seq_len {limit!r} does not fit a length of {manifest['length']}")
    Placement.of_pattern(manifest["ranks"], manifest["block_size"], manifest["pattern"])


def _assemble(folder: str, manifest: Mapping[str, Any], saved: Placement, share: Share) -> KVCache:
    """Put this rank's tokens together from the files that hold them."""
    length, limit = manifest["length"], manifest["max_seq_len"]
    tokens = share.count(length)
    mine = share.placement.positions(share.rank, 0, tokens)
    holders = _holders(saved, mine)
    # A context without tokens here still has a format, which any file tells.
    wanted = np.unique(holders).tolist() or [min(share.rank, saved.num_ranks - 1)]
    part: CacheState | None = None
    maps: list[KeyMap] = []
    for rank in wanted:
        path = os.path.join(folder, _part_name(manifest["save"], rank, saved.num_ranks))
        source = with_turns_stored(state_of(_load_part(path, manifest, saved, rank)))
        if part is None:
            _check_shareable(path, source)
            kept = {k: v for k, v in source.metadata.items() if not k.startswith(_OURS)}
            own_limit = None if limit is None else max(1, share.count(limit))
            part = CacheState.empty(
                source.format,
                own_limit,
                source.key_rule,
                kept,
                [tokens] * source.num_layers,
            )
            maps = [store.key_map for store in source.stores]
        elif source.format != part.format:
            raise CorruptFileError(
                f"{path}: it holds {source.format}, and the first file {part.format}"
            )
        to = np.flatnonzero(holders == rank)
        rows = saved.count(mine[to], rank)
        for index, (store, theirs) in enumerate(zip(part.stores, source.stores, strict=True)):
            if not theirs.key_map.is_same(maps[index]):
                raise CorruptFileError(f"{path}: layer {index} has another key offset or scale")
            view = theirs.view()
            for slab, stored in zip(store.slabs, view.slabs, strict=True):
                slab[to] = stored[view.start + rows]
    assert part is not None
    part.adopt(tokens, [(tokens, key_map, 0, (), None, 0) for key_map in maps])
    return cache_over(KVCache, part)


def _check_shareable(path: str, source: CacheState) -> None:
    try:
        source.refuse_states("a context over processes")
        for config in source.format.layers:
            check_shareable(config)
    except InvalidArgumentError as error:
        raise CorruptFileError(f"{path}: it is no part of a context: {error}") from error


def _holders(placement: Placement, positions: np.ndarray) -> np.ndarray:
    """Rank of each position."""
    pattern = np.array(placement.pattern)
    holders: np.ndarray = pattern[positions // placement.block_size % len(pattern)]
    return holders


def _load_part(path: str, manifest: Mapping[str, Any], saved: Placement, rank: int) -> KVCache:
    try:
        source = KVCache.load(path, mmap=True)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            error.errno,
            f"the part of rank {rank} of {saved.num_ranks}, which holds tokens for this rank, is "
            "not in the folder here: copy it from the machine that wrote it",
            path,
        ) from error
    told = (source.metadata.get(f"{_OURS}save"), source.metadata.get(f"{_OURS}rank"))
    if told != (manifest["save"], str(rank)):
        raise CorruptFileError(
            f"{path}: it is of save {told[0]}, rank {told[1]}, and not of save "
            f"{manifest['save']}, rank {rank}, as the manifest says"
        )
    wanted = saved.count(manifest["length"], rank)
    if len(source) != wanted:
        raise CorruptFileError(
            f"{path}: it holds {len(source)} tokens, and {wanted} in the manifest"
        )
    return source
