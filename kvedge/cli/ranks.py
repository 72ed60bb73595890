"""``kvedge generate`` under torchrun: each process runs the model, the context is shared out.

Rank 0 chooses the tokens, and all others take its choice: machines that round otherwise than it
would else part from it. It alone prints.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvedge.console.exits import UsageError
from kvedge.console.values import positive_float, positive_int

if TYPE_CHECKING:
    from kvedge.distributed import ShardedKVCache, TorchGroup

__all__ = [
    "SharedSampler",
    "add_options",
    "begun",
    "is_rank",
    "joined",
    "new_cache",
    "placement_options",
    "shared_logits",
    "shared_seed",
]

_TIMEOUT = 60.0
_LOADING = 600.0  # seconds that one rank may take longer than another to load the model
# What needs tokens to move between ranks, or a prompt on every rank.
_REFUSED = ("chat", "prompt_cache", "window")
_OF_RANKS = ("block_size", "rank_weights", "rank_timeout")


def add_options(group: Any) -> None:
    """Declare the flags, in a group of a parser."""
    group.add_argument(
        "--block-size",
        type=positive_int,
        metavar="N",
        help="tokens that lie on a rank before the next rank's begin (default: 256)",
    )
    group.add_argument(
        "--rank-weights",
        type=_weights,
        metavar="W,W[,...]",
        help="for each rank a number in proportion to the tokens it shall hold, or 'measured': the "
        "speed at which it reads memory (default: all alike)",
    )
    group.add_argument(
        "--rank-timeout",
        type=positive_float,
        metavar="SECONDS",
        help=f"a rank that does not answer for so long counts as lost (default: {_TIMEOUT:g})",
    )


def _weights(text: str) -> str | list[float]:
    return text if text == "measured" else [positive_float(part) for part in text.split(",")]


def is_rank() -> bool:
    """Whether torchrun has started this process; also where it is the only one."""
    named = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return all(os.environ.get(name) for name in named)


@contextlib.contextmanager
def joined(options: argparse.Namespace) -> Iterator[TorchGroup | None]:
    """Be a rank, if torchrun has started this process; ranks but 0 print nothing meanwhile.

    Raises
    ------
    UsageError
        A flag that ranks do not go with, or one for ranks without them.
    MissingExtraError
        torch is not installed.
    """
    if not is_rank():
        for name in _OF_RANKS:
            if getattr(options, name) is not None:
                raise UsageError(
                    f"--{name.replace('_', '-')} is for several processes: run "
                    "'torchrun --nproc-per-node N -m kvedge generate ...'"
                )
        yield None
        return
    for name in _REFUSED:
        if getattr(options, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')} does not go with torchrun")
    if options.on_full == "shift":
        raise UsageError("--on-full shift does not go with torchrun: tokens stay on their ranks")
    from kvedge.distributed.group import TorchGroup, torch_distributed

    distributed = torch_distributed()
    timeout = options.rank_timeout or _TIMEOUT
    distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=max(timeout, 60)))
    options.rank_timeout = timeout
    group = TorchGroup(timeout=max(timeout, _LOADING))  # until all have loaded the model: begun()
    _share_cores(options)
    if options.rank_weights == "measured":
        from kvedge.distributed import measure_weights

        options.rank_weights = measure_weights(group, num_threads=options.threads)
    with _silent() if group.rank else contextlib.nullcontext():
        yield group
    distributed.destroy_process_group()  # after an error it might wait for a rank that is lost


def begun(options: argparse.Namespace) -> None:
    """Take the user's timeout from now on: the caches of all ranks have met."""
    if options.group is not None:
        options.group.timeout = options.rank_timeout


def _share_cores(options: argparse.Namespace) -> None:
    """Let processes of one machine take a part of its cores each, unless told otherwise."""
    if options.threads is None:
        import kvedge

        here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        options.threads = max(1, kvedge.get_num_threads() // here)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Print nothing; an error is told when this is over."""
    with (
        open(os.devnull, "w", encoding="utf-8") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        yield
        sys.stdout.flush()


def placement_options(options: argparse.Namespace) -> dict[str, Any]:
    """How the flags place tokens: arguments of a ShardedKVCache."""
    placement: dict[str, Any] = {"weights": options.rank_weights}
    if options.block_size is not None:
        placement["block_size"] = options.block_size
    return placement


def new_cache(
    options: argparse.Namespace, group: TorchGroup, model: Any, more: dict[str, Any]
) -> ShardedKVCache:
    """Return an empty cache of a model, over ranks, for as many tokens as one would take."""
    from kvedge.distributed import Placement, ShardedKVCache

    where = placement_options(options)
    placement = Placement(group.size, **where)
    limit = more.pop("max_seq_len", model.config.max_seq_len)
    own = max(1, placement.count(limit, group.rank))
    # A layer that sees a window keeps all tokens too: attention is told of the window.
    more["window"] = None
    return ShardedKVCache(model.new_cache(max_seq_len=own, **more), group, **where)


class SharedSampler:
    """A sampler whose every token is the one that rank 0 draws."""

    def __init__(self, sampler: Any, group: TorchGroup) -> None:
        self._sampler = sampler
        self._group = group

    def __call__(self, logits: np.ndarray, seen: Sequence[int] = ()) -> int:
        """Draw a token; all ranks call it."""
        # Every rank draws, so that the state of the generator is the same on all.
        drawn = np.array([self._sampler(logits, seen)], np.int64)
        return int(self._group.broadcast(drawn.view(np.uint8)).view(np.int64)[0])

    @property
    def random_state(self) -> dict[str, Any]:
        """State of the generator; see :class:`kvedge.llama.Sampler`."""
        state: dict[str, Any] = self._sampler.random_state
        return state

    @random_state.setter
    def random_state(self, state: dict[str, Any]) -> None:
        self._sampler.random_state = state


def shared_logits(group: TorchGroup) -> Any:
    """A logits processor for transformers' ``generate``: all ranks go on with rank 0's logits."""
    import torch

    def processor(input_ids: Any, scores: Any) -> Any:
        floats = scores.detach().float().contiguous().numpy()
        shared = group.broadcast(floats.reshape(-1).view(np.uint8)).view(np.float32)
        return torch.from_numpy(shared.reshape(floats.shape)).to(scores.dtype)

    return processor


def shared_seed(group: TorchGroup, seed: int) -> int:
    """Rank 0's seed."""
    return int(group.broadcast(np.array([seed], np.int64).view(np.uint8)).view(np.int64)[0])
