"""The session of ``kvedge generate``: a saved cache, with the text and the draws that led to it.

The cache is kvedge's own session file (:meth:`kvedge.KVCache.save`). Its user metadata, all text:

    model, model_sha256   file name and digest of the model: a cache is of use to no other
    tokens                JSON list of all token ids, the last of them perhaps not in the cache yet
    text                  the same as text, for readers of the file
    ended                 "true" if the model had ended the text
    sampling              JSON: how tokens were chosen, the seed, the state of the random generator
    exact_tokens          how many first tokens have keys and values as a fresh run would give them;
                          fewer than all after the context was shifted
    namespace             of a prompt cache: what else its keys are of. model_sha256 is then the
                          digest of both, so that earlier versions refuse the file
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvedge.cli import engines, sampling
from kvedge.console.exits import CommandError
from kvedge.errors import InvalidArgumentError
from kvedge.files.replacing import check_folder, check_target

if TYPE_CHECKING:
    from kvedge import KVCache
    from kvedge.llama import Generation, LlamaModel

__all__ = [
    "OtherNamespaceError",
    "SavedText",
    "check_can_save",
    "common_prefix",
    "digest_of",
    "load",
    "save",
    "set_random_state",
]


_MORE = ("conversation",)  # metadata of conversations


class OtherNamespaceError(CommandError):
    """A prompt cache whose keys are of something else beside the model and token ids."""


@dataclass(frozen=True)
class SavedText:
    """Where a generation stopped; None where nothing was said."""

    tokens: Sequence[int] = field(default_factory=list)
    ended: bool = False
    settings: dict[str, Any] = field(default_factory=dict)  # of kvedge.cli.sampling
    seed: int | None = None
    random_state: dict[str, Any] | None = None  # of NumPy's bit generator
    exact: int = 0  # first tokens whose rows are those of a fresh run
    more: dict[str, str] = field(default_factory=dict)  # further metadata


def check_can_save(path: str, *, folder: bool = False) -> None:
    """Find out before the work, not after it, that a session could not be saved.

    That of several ranks is a folder, which may be there.

    Raises
    ------
    InvalidArgumentError, OSError
        As of :func:`kvedge.files.replacing.check_target`.
    """
    if folder:
        from kvedge.distributed.files import MANIFEST

        check_folder(path, MANIFEST)
    else:
        check_target(path)


def save(
    path: str,
    cache: KVCache,
    text: SavedText,
    model: LlamaModel,
    model_path: str,
    *,
    namespace: str = "",
) -> None:
    """Save a cache and the text that it holds, the one whole or not at all."""
    assert model.tokenizer is not None
    chosen = {**text.settings, "seed": text.seed, "random_state": text.random_state}
    metadata = {
        "model": os.fsencode(Path(model_path).name).decode("utf-8", "replace"),
        "model_sha256": _digest(model_path, namespace),
        "tokens": json.dumps(list(text.tokens)),
        "text": model.tokenizer.decode(text.tokens),
        "ended": json.dumps(text.ended),
        "sampling": json.dumps(chosen),
        "exact_tokens": str(text.exact),
        **text.more,
        **({"namespace": namespace} if namespace else {}),
    }
    cache.save(path, metadata=metadata)


def load(
    path: str,
    model: LlamaModel,
    model_path: str,
    *,
    ranks: Mapping[str, Any] | None = None,
    namespace: str = "",
) -> tuple[KVCache, SavedText]:
    """Load what :func:`save` wrote; with `ranks`, arguments of ShardedKVCache.load, a folder.

    Raises
    ------
    OtherNamespaceError
        It is of another namespace.
    CommandError
        It is a cache, but no session of this command, or one of another model.
    CorruptFileError, OSError
        As :meth:`kvedge.KVCache.load`.
    """
    if ranks is not None:
        from kvedge.distributed import ShardedKVCache

        cache: Any = ShardedKVCache.load(path, **ranks)
    elif os.path.isdir(path):
        raise CommandError(
            f"{path} is a folder: a session of several processes goes on with 'torchrun "
            "--nproc-per-node N -m kvedge generate', also with N=1"
        )
    else:
        cache = engines.load_cache(path, model)
    metadata = cache.metadata
    missing = {"model", "model_sha256", "tokens", "ended", "sampling"} - metadata.keys()
    if missing:
        raise CommandError(
            f"{path} is a kvedge cache, but 'kvedge generate' did not write it: "
            f"its metadata lacks {', '.join(sorted(missing))}"
        )
    if metadata.get("namespace", "") != namespace:
        raise OtherNamespaceError(f"{path} is a prompt cache of another --namespace")
    if metadata["model_sha256"] != _digest(model_path, namespace):
        raise CommandError(
            f"{path} is a session of another model, {metadata['model']} "
            f"(sha256 {metadata['model_sha256'][:16]}...), and cannot go on with "
            f"{Path(model_path).name}"
        )
    try:
        text = _saved_text(metadata, len(cache), model.config.vocab_size)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CommandError(f"{path}: the session's metadata is damaged: {error!r}") from error
    return cache, text


def _saved_text(metadata: dict[str, str], num_cached: int, vocab_size: int) -> SavedText:
    tokens, chosen = json.loads(metadata["tokens"]), json.loads(metadata["sampling"])
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise ValueError("tokens must be a list of whole numbers")
    least = 0 if "conversation" in metadata else 1  # its messages can make them anew
    if len(tokens) < max(num_cached, least):
        raise ValueError(f"{len(tokens)} tokens, but {num_cached} are in the cache")
    if not all(0 <= token < vocab_size for token in tokens):
        raise ValueError(f"a token is outside the vocabulary of {vocab_size}")
    exact = int(metadata.get("exact_tokens", len(tokens)))
    if not 0 <= exact <= len(tokens):
        raise ValueError(f"{exact} exact tokens of {len(tokens)}")
    return SavedText(
        tokens=tokens,
        ended=json.loads(metadata["ended"]) is True,
        settings=_settings(chosen),
        seed=int(chosen["seed"]),
        random_state=chosen["random_state"],
        exact=exact,
        more={name: text for name, text in metadata.items() if name in _MORE},
    )


def _settings(saved: dict[str, Any]) -> dict[str, Any]:
    """How tokens were chosen; earlier versions saved temperature and top_p alone."""
    found: dict[str, Any] = {}
    for name, default in sampling.DEFAULTS.items():
        if name == "logit_bias":
            found[name] = {int(id): float(bias) for id, bias in saved.get(name, {}).items()}
        elif name == "samplers":
            found[name] = tuple(map(str, saved.get(name, sampling.TRANSFORMERS_ORDER)))
        elif name in saved or name in ("temperature", "top_p"):
            found[name] = type(default)(saved[name])
    return found


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Tokens that two sequences begin with alike."""
    pairs = zip(first, second, strict=False)
    same = (index for index, (token, other) in enumerate(pairs) if token != other)
    return next(same, min(len(first), len(second)))


def _digest(path: str, namespace: str) -> str:
    """Of the model; of both where there is a namespace."""
    own = digest_of(path)
    return hashlib.sha256(f"{own} {namespace}".encode()).hexdigest() if namespace else own


def digest_of(path: str) -> str:
    """SHA-256 of a file."""
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):  # hashlib.file_digest is of Python 3.11
            digest.update(block)
    return digest.hexdigest()


def set_random_state(generation: Generation, state: dict[str, Any] | None) -> None:
    """Let a generation's draws go on from a state; None leaves them at their seed.

    Raises
    ------
    CommandError
        It is no such state.
    """
    if state is None:
        return
    try:
        generation.sampler.random_state = state
    except InvalidArgumentError as error:
        raise CommandError(f"the session's random state is damaged: {error}") from error
