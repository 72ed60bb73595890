"""One rank's share of a context: its place among the ranks, and what all of them do together."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvedge._version import __version__
from kvedge.core.options import AttendOptions
from kvedge.distributed.attention import attend_part
from kvedge.distributed.group import Group, as_group
from kvedge.distributed.placement import BLOCK_SIZE, Placement
from kvedge.errors import GroupMismatchError
from kvedge.merge import merged_parts, rounded

__all__ = ["Share", "join"]

PROTOCOL = 1  # of the messages below
# What each message of attention begins with, int64: all ranks have to be at the same point.
_HEAD = ("layer", "query rows", "query heads", "tokens of the context", "sequences", "call")


class Share:
    """A group of ranks, and which tokens this one holds."""

    def __init__(self, group: Group, placement: Placement) -> None:
        self.group = group
        self.placement = placement
        self.rank = group.rank
        self.size = group.size
        self._calls = 0  # of attention so far

    def __deepcopy__(self, memo: dict[int, Any]) -> Share:
        """Return itself: a copy of a cache is in the same group."""
        return self

    def count(self, length: int) -> int:
        """Tokens held here of the first `length` of a context."""
        return int(self.placement.count(length, self.rank))

    def own_positions(self, start: int, stop: int) -> np.ndarray:
        """Which of the positions start to stop - 1 are of this rank, counted from start."""
        return self.placement.held_by(self.rank, start, stop)

    def placement_facts(self) -> dict[str, Any]:
        """What of the placement ranks have to agree on."""
        return {
            "block_size": self.placement.block_size,
            "the order of ranks": list(self.placement.pattern),
        }

    # ---- what all ranks do together ------------------------------------------------------------

    def tell(self, told: Any) -> list[Any]:
        """Exchange small JSON values; all ranks call it. Returns those of all ranks, in order."""
        data = np.frombuffer(json.dumps(told).encode(), np.uint8)
        sizes = self.group.all_gather(np.array([len(data)], np.int64).view(np.uint8))
        lengths = sizes.view(np.int64)[:, 0]
        padded = np.zeros(int(lengths.max()), np.uint8)
        padded[: len(data)] = data
        rows = self.group.all_gather(padded)
        return [
            json.loads(row[:n].tobytes().decode()) for row, n in zip(rows, lengths, strict=True)
        ]

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Raise on all ranks unless they say the same.

        Parameters
        ----------
        facts : mapping
            Names, as a message has them, to JSON values.

        Raises
        ------
        GroupMismatchError
            With both sides' figures.
        """
        mine = {"version of kvedge": __version__, "protocol": PROTOCOL, **facts}
        told = self.tell(mine)
        for rank, theirs in enumerate(told):
            for name in {**told[0], **theirs}:
                first, other = told[0].get(name), theirs.get(name)
                if first != other:
                    raise GroupMismatchError(
                        f"the ranks do not fit together: {name} is {_text(other)} on rank {rank}, "
                        f"and {_text(first)} on rank 0",
                        expected=first,
                        got=other,
                    )

    def attend(
        self,
        index: int,
        layers: Sequence[Any],
        queries: Sequence[np.ndarray],
        length: int,
        options: Sequence[AttendOptions],
        passed: Mapping[str, Any],
        sinks: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Attention over the whole context, one layer's; all ranks call it.

        Parameters
        ----------
        index : int
            Number of the layer in the model.
        layers : sequence of layers
            The parts held here: one for each sequence.
        queries : sequence of ndarray of float32, (n, num_heads, head_dim)
            One for each sequence, for the last n tokens.
        length : int
            Tokens of the context of each sequence.
        options : sequence of AttendOptions
            One for each sequence, of the whole context.
        passed : mapping
            Options that are the same for a part.
        sinks : ndarray of float32, optional
            Learned logits that join each denominator, broadcast to (sequences, n, num_heads).

        Returns
        -------
        out : ndarray of float64, (sequences, n, num_heads, value_head_dim)
        lse : ndarray of float64, (sequences, n, num_heads)
            The same bits on all ranks.
        """
        n, num_heads = queries[0].shape[:2]
        width = layers[0].value_head_dim
        shape = (len(layers), n, num_heads)
        head = np.array([index, n, num_heads, length, len(layers), self._calls], np.int64)
        message = np.empty(head.nbytes + 4 * math.prod(shape) * (1 + width), np.uint8)
        message[: head.nbytes] = head.view(np.uint8)
        lse_at = slice(head.nbytes, head.nbytes + 4 * math.prod(shape))
        out_at = slice(lse_at.stop, None)
        lse = message[lse_at].view(np.float32).reshape(shape)
        out = message[out_at].view(np.float32).reshape(*shape, width)
        for i, layer in enumerate(layers):
            attend_part(
                layer,
                self.placement,
                self.rank,
                length,
                queries[i],
                options[i],
                dict(passed),
                out[i],
                lse[i],
            )
        self._calls += 1
        if self.size == 1:
            outs, lses = out[np.newaxis], lse[np.newaxis]
        else:
            gathered = self.group.all_gather(message)
            self._check_heads(gathered[:, : head.nbytes], head)
            lses = gathered[:, lse_at].copy().view(np.float32).reshape(self.size, *shape)
            outs = gathered[:, out_at].copy().view(np.float32).reshape(self.size, *shape, width)
        whole, lse_of_all = merged_parts(outs, lses)
        if sinks is not None:
            before = lse_of_all
            lse_of_all = np.logaddexp(before, sinks.astype(np.float64))
            with np.errstate(invalid="ignore"):
                kept = np.exp(before - lse_of_all)
            whole *= np.where(np.isneginf(before), 0.0, kept)[..., np.newaxis]
        return rounded(whole, whole), rounded(lse_of_all, lse_of_all)

    def _check_heads(self, heads: np.ndarray, mine: np.ndarray) -> None:
        """Raise unless all ranks are at the same point of the same call."""
        told = heads.copy().view(np.int64)
        if (told == mine).all():
            return
        rank, field = np.argwhere(told != mine)[0]
        raise GroupMismatchError(
            f"the ranks are not doing the same: {_HEAD[field]} is {told[rank, field]} on rank "
            f"{rank}, and {mine[field]} on rank {self.rank}",
            expected=int(mine[field]),
            got=int(told[rank, field]),
        )


def join(
    group: Any,
    timeout: float,
    *,
    block_size: int | None = None,
    weights: Sequence[float] | None = None,
) -> Share:
    """This rank's share in a group of any kind; arguments as of ShardedKVCache."""
    joined = as_group(group, timeout)
    blocks = BLOCK_SIZE if block_size is None else block_size
    placement = Placement(joined.size, block_size=blocks, weights=weights)
    share = Share(joined, placement)
    share.agree(share.placement_facts())
    return share


def _text(value: Any) -> str:
    return "missing" if value is None else str(value)
