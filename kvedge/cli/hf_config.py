"""What a model keeps of each token, from its Hugging Face ``config.json``.

Field names and defaults are those of the models' own configuration classes in transformers 5.23.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from kvedge.cli.layer_groups import CacheShape, LayerGroup
from kvedge.cli.layer_kinds import (
    FULL,
    NOTHING,
    SLIDING,
    WINDOWS,
    kv_heads_of_layers,
    layer_kinds,
    layer_names,
    sliding_window,
    windows_of_layers,
)
from kvedge.cli.layer_states import state_of
from kvedge.console.exits import CommandError
from kvedge.console.sizes import format_size

__all__ = ["shape_from_hf_config"]

_Found = TypeVar("_Found")
_Shape = tuple[int, int, int]  # KV heads, channels of a key, of a value
_Kept = tuple[str, _Shape, "int | None"]  # kind of a layer, its shape, its window

# The same number under the names that the families of models give it; the first is today's usual.
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_transformer_layers")
_DECODER_LAYERS = ("num_decoder_layers", "decoder_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "num_query_heads")
_DECODER_HEADS = ("decoder_attention_heads",)
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
_HEAD_DIM = ("head_dim", "kv_channels", "d_kv")
_VALUE_DIM = ("v_head_dim",)
_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim", "model_dim")
_CONTEXT = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "seq_length"),
    "max_context_length",
)
# Of these a file may have a list, with a number for each layer.
_OF_EACH = (*_HEADS, *_DECODER_HEADS, *_KV_HEADS, *_HEAD_DIM, *_VALUE_DIM, *WINDOWS)
# Where models that also see or hear keep the configuration of the part that writes.
_TEXT = ("text_config", "language_config", "llm_config", "thinker_config")
_MOST_LAYERS = 1 << 16
# Models whose configuration class has multi_query=True where the file says nothing.
_MULTI_QUERY = ("falcon", "gpt_bigcode", "RefinedWebModel")


def shape_from_hf_config(path: str) -> CacheShape:
    """Read the shape from a Hugging Face ``config.json`` (or the folder that holds it).

    Raises
    ------
    CommandError
        If the file is not JSON, or lacks a number that the shape needs.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    try:
        config = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:  # also JSONDecodeError, UnicodeDecodeError
        raise CommandError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise CommandError(f"{file} must hold a JSON object, not a {type(config).__name__}")
    name = config.get("_name_or_path") or config.get("model_type") or file.name
    while _find(config, _LAYERS) is None:
        inner = next((config[key] for key in _TEXT if isinstance(config.get(key), dict)), None)
        if inner is None:
            break
        config = {"model_type": config.get("model_type"), **inner}
    return _Model(str(name), config, file).shape()


class _Model:
    """A configuration, and what is made of it."""

    def __init__(self, name: str, config: Mapping[str, Any], file: Path) -> None:
        self.name, self.config, self.file = name, config, file
        self.notes: list[str] = []

    def shape(self) -> CacheShape:
        decodes = self.config.get("is_encoder_decoder") is True
        layers = self._optional(_DECODER_LAYERS) if decodes else None
        if layers is None:
            layers = self._optional(_LAYERS)  # None: a list may tell
        if layers is None:
            lists = (self.config.get(name) for name in _OF_EACH)
            layers = next(
                (len(listed) for listed in lists if isinstance(listed, list) and listed), None
            )
        if layers is not None and layers > _MOST_LAYERS:
            raise CommandError(f"{self.file}: {layers} layers, where {_MOST_LAYERS} are the most")
        if layers is not None and self.config.get("model_type") == "longcat_flash":
            layers *= 2  # each has two attentions
        kinds = self._kinds(layers)
        state_bytes = self._states(layers)
        if decodes:
            self.notes.append("cross-attention to the encoder's output is not counted")
        models = self._of_layers(len(kinds))
        having = [i for i, kind in enumerate(kinds) if kind != NOTHING]
        heads = {i: models[i]._heads(decodes) for i in having}
        few = self._readable(lambda: kv_heads_of_layers(self.config, heads, len(kinds)))
        known: dict[int, dict[str, tuple[_Shape, _Shape | None]]] = {}  # by the model of a layer
        kept: list[_Kept] = []
        latents: list[_Kept] = []
        for i in having:
            model, kind, own = models[i], kinds[i], few[i]
            if id(model) not in known:
                known[id(model)] = model._attention(heads[i])
            (of_all, key, value), latent = known[id(model)][kind]
            window = model._window() if kind == SLIDING else None
            kept.append((kind, (of_all if own is None else own, key, value), window))
            if latent is not None:
                latents.append((kind, latent, window))
        notes = (note for model in models if model is not self for note in model.notes)
        self.notes += dict.fromkeys(notes)
        return CacheShape(
            self.name,
            _groups(kept),
            self._optional(_CONTEXT),
            tuple(self.notes),
            tuple(map(_keeping_once, _groups(latents))),
            state_bytes,
        )

    def _of_layers(self, n: int) -> list[_Model]:
        """Itself for each layer; where the file lists numbers of layers, one with those of each."""
        lists = [name for name in _OF_EACH if isinstance(self.config.get(name), list)]
        if not lists:
            return [self] * n
        config = self.config
        others = {name: value for name, value in config.items() if name not in lists}
        own = [{name: config[name][i] for name in lists if i < len(config[name])} for i in range(n)]
        return [_Model(self.name, others | layer, self.file) for layer in own]

    def _heads(self, decodes: bool) -> int:
        """Query heads."""
        heads = self._optional(_DECODER_HEADS) if decodes else None
        return self._number(_HEADS) if heads is None else heads

    # ---- a layer of each kind: KV heads, channels of a key, of a value -------------------------

    def _attention(self, heads: int) -> dict[str, tuple[_Shape, _Shape | None]]:
        """Of a layer that sees all and of one that slides; and of what latents it may be made."""
        if self.config.get("kv_lora_rank"):
            return dict.fromkeys((FULL, SLIDING), self._latent_attention(heads))
        kv_heads = self._kv_heads(heads)
        head_dim = self._optional(_HEAD_DIM)
        if head_dim is None:
            head_dim = self._number(_HIDDEN) // heads
        # Gemma 4: layers that see all have heads of their own.
        wide = self._optional(("global_head_dim",)) or head_dim
        few = self._optional(("num_global_key_value_heads",))
        if few is None or not self.config.get("attention_k_eq_v", True):
            few = kv_heads
        return {FULL: ((few, wide, wide), None), SLIDING: ((kv_heads, head_dim, head_dim), None)}

    def _kv_heads(self, heads: int) -> int:
        config = self.config
        many = config.get("attn_config")  # MPT, DBRX
        many = many if isinstance(many, dict) else {}
        if many.get("attn_type") == "multiquery_attention":
            return 1
        own = self._optional(("kv_n_heads",), many)
        kv_heads = self._optional(_KV_HEADS) or own or heads  # else every query head has its own
        if config.get("new_decoder_architecture") is True:  # Falcon 40B: num_kv_heads counts
            if kv_heads != heads:
                self.notes.append(
                    f"transformers keeps Falcon's {kv_heads} KV heads repeated for all {heads}"
                    " query heads: these are the sizes of the model's own heads"
                )
            return kv_heads
        multi_query = config.get("multi_query", config.get("model_type") in _MULTI_QUERY)
        return 1 if multi_query is True else kv_heads  # Falcon 7B has num_kv_heads 71 and uses 1

    def _latent_attention(self, heads: int) -> tuple[_Shape, _Shape]:
        """Multi-head latent attention (DeepSeek-V2): expanded, and as the latents it projects."""
        rank, rope = self._number(("kv_lora_rank",)), self._number(("qk_rope_head_dim",))
        head_dim = self._number(("qk_nope_head_dim",)) + rope
        value = self._optional(_VALUE_DIM) or self._number(_HIDDEN) // heads
        self.notes.append(
            f"latent attention: expanded, {heads} heads have keys of {head_dim} channels and values"
            f" of {value}; a latent has {rank} + {rope} channels, of which the first {rank} are"
            f" the value. kvedge keeps values apart: a KVCache of head_dim={rank + rope} and"
            f" value_head_dim={rank} takes {(2 * rank + rope) / (rank + rope):.2f} times as much"
        )
        return (heads, head_dim, value), (1, rank + rope, rank)

    # ---- layers ---------------------------------------------------------------------------------

    def _window(self) -> int | None:
        return sliding_window(self.config)

    def _kinds(self, layers: int | None) -> list[str]:
        """What each layer keeps; notes tell where it is not all."""
        kinds, notes = self._readable(lambda: layer_kinds(self.config, layers))
        count, of = Counter(kinds), len(kinds)
        windows = windows_of_layers(self.config) or [self._window()]
        told = sorted({window for window in windows if window is not None})
        if count[SLIDING] and not told:
            self.notes.append(
                f"{count[SLIDING]} of {of} layers slide over a window that the file does not tell:"
                " they are counted in full"
            )
        elif count[SLIDING]:
            self.notes.append(
                f"{count[SLIDING]} of {of} layers have a sliding window of "
                f"{' or '.join(map(str, told))} tokens:"
                " each is counted with at most twice as many"
            )
        if count[NOTHING]:
            self.notes.append(
                f"{count[NOTHING]} of {of} layers keep no keys and values of each token (linear"
                " attention, convolution, cross-attention, rows of another layer)"
            )
        self.notes += notes
        if count[NOTHING] == of:
            raise CommandError(f"{self.file}: no layer of the model keeps keys and values")
        return kinds

    def _states(self, layers: int | None) -> int:
        """Bytes of the states that layers keep; a note tells them."""
        names = self._readable(lambda: layer_names(self.config, layers))
        states = [state for name in names if (state := state_of(self.config, name)) is not None]
        total = sum(state.num_bytes for state in states)
        if states:
            self.notes.append(
                f"{len(states)} of {len(names)} layers keep a state, {format_size(total)} together"
                " whatever the context (recurrent ones in float32, convolutions in 16 bits):"
                " counted in every format"
            )
        return total

    def _readable(self, read: Callable[[], _Found]) -> _Found:
        try:
            return read()
        except (TypeError, ValueError, ArithmeticError) as error:
            what = f"{self.file}: which layers have attention cannot be read: {error}"
            raise CommandError(what) from error

    # ---- numbers --------------------------------------------------------------------------------

    def _optional(
        self, names: tuple[str, ...], config: Mapping[str, Any] | None = None
    ) -> int | None:
        config = self.config if config is None else config
        value = _find(config, names)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            key = next(name for name in names if config.get(name) is not None)
            raise CommandError(
                f"{self.file}: {key} must be a whole number of 1 or more, not {value!r}"
            )
        return value

    def _number(self, names: tuple[str, ...]) -> int:
        value = self._optional(names)
        if value is None:
            others = f" (nor {', '.join(names[1:])})" if names[1:] else ""
            raise CommandError(
                f"{self.file} has no {names[0]}{others}: the model has a default that the file does"
                " not tell; give --layers, --kv-heads and --head-dim"
            )
        return value


def _groups(kept: list[_Kept]) -> tuple[LayerGroup, ...]:
    """Layers of one shape and window together, those that see all first."""
    count = Counter(layer for wanted in (FULL, SLIDING) for layer in kept if layer[0] == wanted)
    return tuple(LayerGroup(n, *shape, window=of) for (_, shape, of), n in count.items())


def _keeping_once(group: LayerGroup) -> LayerGroup:
    return LayerGroup(
        group.count, group.num_kv_heads, group.head_dim, group.value_head_dim, group.window, True
    )


def _find(config: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), None)
