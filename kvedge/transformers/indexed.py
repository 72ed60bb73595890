"""Layers whose attention reads what an indexer chose: index keys beside keys and values.

The model's indexer appends index keys, reads all of them and says which tokens a query reads. They
are tensors in the model's type, of all tokens, padding included, as transformers' own layers have
them; what they are (rotated, raw to be pooled, with gates beside) the indexer alone knows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from kvedge.errors import ShapeMismatchError
from kvedge.transformers.layers import KvedgeLayer
from kvedge.transformers.options import StoreOptions
from kvedge.transformers.selection import Selection

__all__ = ["KvedgeIndexedLayer"]


class _Pooled(NamedTuple):
    """Keys of a row's whole blocks of tokens."""

    start: int  # tokens before the first block
    ratio: int  # tokens of a block
    keys: torch.Tensor  # (room, width)
    number: int  # blocks


class KvedgeIndexedLayer(KvedgeLayer):
    """Full attention with an index. A layer may hold index keys alone and read another's rows."""

    def __init__(self, options: StoreOptions, index: int, *, counts_padding: bool = False) -> None:
        super().__init__(options, index)
        self.counts_padding = counts_padding  # blocks are counted from the first token of padding
        self._index_keys: torch.Tensor | None = None  # (batch, room, width)
        self.index_length = 0  # tokens that have index keys
        self._pooled: dict[int, _Pooled] = {}  # keys of blocks, by row; made anew where they lack
        # Positions (axes, batch, tokens) that a model sets on its first indexed layer (Qwen4-Exp).
        self.indexer_position_ids: torch.Tensor | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As of a full layer; latents without a rotated part (GLM 5 Next) are keys alone."""
        if value_states.shape[3]:
            return super().update(key_states, value_states, *args, **kwargs)
        keys, _ = super().update(key_states, key_states[..., :1], *args, **kwargs)
        return keys, value_states.new_empty(*keys.shape[:3], 0)

    @property
    def num_threads(self) -> int:
        """Threads of a call: those that were asked for, or torch's."""
        return self._options.num_threads or torch.get_num_threads()

    # ---- what indexers call ----------------------------------------------------------------------

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Append index keys (batch, tokens, width) and return those of all tokens.

        Raises
        ------
        ShapeMismatchError
            The layer has index keys of another number of sequences, or of another width.
        """
        new = indexer_key_states.detach()
        batch, tokens, width = new.shape
        room = self._index_keys
        start = self.index_length
        if room is None or start == 0:
            room = new.new_empty(batch, 0, width)
        elif (room.shape[0], room.shape[2]) != (batch, width):
            raise ShapeMismatchError(
                f"layer {self._index} has index keys of {room.shape[0]} sequences and "
                f"{room.shape[2]} channels, not {batch} and {width}: reset() the KvedgeCache"
            )
        end = start + tokens
        if end > room.shape[1]:
            grown = new.new_empty(batch, max(end, 2 * start), width)
            grown[:, :start] = room[:, :start]
            room = grown
        room[:, start:end] = new
        self._index_keys, self.index_length = room, end
        return room[:, :end]

    def update_index(self, idx_k: torch.Tensor) -> torch.Tensor:
        """As :meth:`update_indexer`, (batch, 1, tokens, width) (MiniMax M3)."""
        return self.update_indexer(idx_k.squeeze(1)).unsqueeze(1)

    @property
    def is_indexer_initialized(self) -> bool:
        """Whether there are index keys."""
        return self.index_length > 0

    @property
    def indexer_keys(self) -> torch.Tensor | None:
        """The index keys (batch, tokens, width) of all tokens; None before the first."""
        keys = self._index_keys
        return None if keys is None or not self.index_length else keys[:, : self.index_length]

    # ---- tokens out ------------------------------------------------------------------------------

    def attend_chosen(
        self,
        query: torch.Tensor,
        selection: Selection,
        *,
        scale: float | None,
        softcap: float | None,
        sink_logits: torch.Tensor | None,
    ) -> torch.Tensor:
        """As :meth:`attend`, of the last query rows over the tokens that were chosen for them."""
        if self._begun is not None or any(self.padding):
            self._leave_out(selection.starts, 0)
        batch, num_heads, queries, _ = query.shape
        out = query.new_zeros(batch, queries, num_heads, self.rows[0].value_head_dim)
        for i, row in enumerate(self.rows):
            tokens, moved = selection.lists[i], selection.starts[i] - self.padding[i]
            if moved:  # a row that holds padding
                tokens = torch.where(tokens < 0, -1, tokens + moved)
            n = len(tokens)
            if n:
                row.attend(
                    query[i, :, queries - n :],
                    tokens=tokens,
                    scale=scale,
                    softcap=softcap,
                    sink_logits=None if sink_logits is None else sink_logits.detach().float(),
                    precision_bits=self._options.precision_bits,
                    out=out[i, queries - n :].transpose(0, 1),
                    num_threads=self.num_threads,
                    layout="hnd",
                )
        return out

    # ---- lengths, removing and rearranging -------------------------------------------------------

    @property
    def memory_bytes(self) -> int:
        """Bytes that the rows' tokens and their index keys take."""
        keys = self.indexer_keys
        pooled = sum(kept.keys[: kept.number].nbytes for kept in self._pooled.values())
        return super().memory_bytes + pooled + (0 if keys is None else keys.nbytes)

    def pooled_keys(
        self,
        row: int,
        start: int,
        ratio: int,
        pool: Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Keys of the whole blocks of `ratio` tokens of a row, from token `start` on.

        ``pool(row, keys, places)`` makes those of new blocks, of the index keys (blocks, ratio,
        width) of their tokens and of the places of their first ones.

        Returns
        -------
        torch.Tensor
            (blocks, width of what `pool` makes).
        """
        keys = self.indexer_keys
        assert keys is not None
        blocks = (self.index_length - start) // ratio
        kept = self._pooled.get(row)
        if kept is None or kept.start != start or kept.ratio != ratio:
            kept = _Pooled(start, ratio, keys.new_empty(0, 0), 0)
        if kept.number < blocks:
            places = torch.arange(start + kept.number * ratio, start + blocks * ratio, ratio)
            groups = keys[row, int(places[0]) : start + blocks * ratio].unflatten(0, (-1, ratio))
            new = pool(row, groups, places)
            room = kept.keys
            if len(room) < blocks:
                room = new.new_empty(max(blocks, 2 * kept.number), new.shape[1])
                room[: kept.number] = kept.keys[: kept.number] if kept.number else 0
            room[kept.number : blocks] = new
            kept = _Pooled(start, ratio, room, blocks)
        self._pooled[row] = kept
        return kept.keys[:blocks]

    def index_tensors(self) -> dict[str, torch.Tensor]:
        """What a file holds of the index, by name."""
        tensors = {"keys": self.indexer_keys, "positions": self.indexer_position_ids}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def index_of_tokens(self, row: int, start: int, stop: int) -> dict[str, torch.Tensor]:
        """As :meth:`index_tensors`, of some tokens of a row: (tokens, width), (tokens, axes)."""
        keys, positions = self.indexer_keys, self.indexer_position_ids
        found = {} if keys is None else {"keys": keys[row, start:stop]}
        if positions is not None:
            found["positions"] = positions[:, row, start:stop].T
        return found

    def hold_index(self, of_rows: list[dict[str, torch.Tensor]], gaps: list[int]) -> None:
        """Have what :meth:`index_of_tokens` gave of all tokens of each row behind its padding."""
        tensors = {}
        for name in of_rows[0]:
            padded = [
                functional.pad(row[name], (0, 0, gap, 0))
                for row, gap in zip(of_rows, gaps, strict=True)
            ]
            tensors[name] = torch.stack(padded)
        positions = tensors.get("positions")
        self.put_index(
            tensors.get("keys"), None if positions is None else positions.permute(2, 0, 1)
        )

    def put_index_tensors(self, tensors: dict[str, torch.Tensor], length: int) -> None:
        """Have what :meth:`index_tensors` gave, of `length` tokens.

        Raises
        ------
        ValueError
            They are of other tokens or sequences than the rows.
        """
        keys, positions = tensors.get("keys"), tensors.get("positions")
        batch = len(self.rows) if self.rows or keys is None else len(keys)
        if keys is not None and (keys.ndim != 3 or tuple(keys.shape[:2]) != (batch, length)):
            raise ValueError(
                f"layer {self._index} has index keys {tuple(keys.shape)}, not of {batch} sequences "
                f"of {length} tokens"
            )
        if positions is not None and (
            positions.ndim != 3 or positions.shape[1:] != (batch, length)
        ):
            raise ValueError(f"layer {self._index} has positions {tuple(positions.shape)}")
        self.put_index(keys, positions)

    def put_index(self, keys: torch.Tensor | None, positions: torch.Tensor | None) -> None:
        """Have index keys (batch, tokens, width), and positions (axes, batch, tokens), or none."""
        self._index_keys, self.index_length = keys, 0 if keys is None else keys.shape[1]
        self.indexer_position_ids = positions
        self._pooled = {}

    def truncate_index(self, length: int) -> None:
        """Have index keys and positions of the first `length` tokens at most."""
        self.index_length = min(self.index_length, length)
        for row, kept in self._pooled.items():
            number = max(length - kept.start, 0) // kept.ratio
            self._pooled[row] = kept._replace(number=min(kept.number, number))
        if self.indexer_position_ids is not None:
            kept = self.indexer_position_ids[..., :length]
            self.indexer_position_ids = kept if length else None

    def reset(self) -> None:
        """Drop all tokens; the next may be of another batch."""
        super().reset()
        self.put_index(None, None)

    def crop(self, length: int) -> None:
        """Drop the last tokens, as the installed transformers means the number."""
        seen = max(self.get_seq_length(), self.index_length)
        super().crop(length)
        self.truncate_index(self._options.tokens_after_crop(length, seen))

    def _batch(self) -> int:
        keys = self.indexer_keys
        return super()._batch() or (0 if keys is None else len(keys))

    def _take(self, indices: torch.Tensor) -> None:
        if self.rows:
            super()._take(indices)
        keys, positions = self.indexer_keys, self.indexer_position_ids
        self.put_index(
            None if keys is None else keys[indices],
            None if positions is None else positions[:, indices],
        )
