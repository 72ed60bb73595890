"""Steps of states that ``python -m bench state`` times: kvedge's, and transformers' functions."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

import kvedge
from kvedge.core.half import encode_bfloat16
from kvedge.core.memory import aligned_copy
from kvedge.core.packages import obstacle

__all__ = ["LAYERS", "Layer", "Steps", "torch_version"]

Step = Callable[[int], object]  # of the state of that number


@dataclass(frozen=True)
class Layer:
    """A layer with a state, by its sizes."""

    name: str
    kind: Literal["delta", "kda", "mamba", "conv"]
    heads: int  # or channels of a convolution
    rows: int  # key_dim, head_dim; or the width of a convolution
    columns: int = 1  # value_dim, state_size

    @property
    def elements(self) -> int:
        """Numbers of the state; of a convolution as many inputs as it is wide."""
        return self.heads * self.rows * self.columns

    def __str__(self) -> str:
        what = {"delta": "gated delta net", "kda": "KDA", "mamba": "Mamba-2"}
        if self.kind == "conv":
            return f"{self.name}: convolution, {self.heads} channels, width {self.rows}"
        return f"{self.name}: {what[self.kind]}, {self.heads} heads of {self.rows} x {self.columns}"


#: Layers of models, by name.
LAYERS = {
    layer.name: layer
    for layer in (
        Layer("qwen3.5-0.8b", "delta", 16, 128, 128),
        Layer("kimi-linear", "kda", 32, 128, 128),
        Layer("granite4-350m", "mamba", 48, 32, 128),
        Layer("qwen3.5-0.8b-conv", "conv", 6144, 4),
        Layer("granite4-350m-conv", "conv", 1792, 4),
        Layer("lfm2-350m", "conv", 1024, 3),
    )
}


def torch_version() -> str | None:
    """Versions of torch and transformers, whose functions are measured too; None without them."""
    names = ("torch", "transformers")
    if any(map(obstacle, names)):
        return None
    version = " / ".join(importlib.metadata.version(name) for name in names)
    return version if int(importlib.metadata.version("transformers").split(".")[0]) >= 5 else None


class Steps:
    """States of a layer, as many as are read in turn, and tokens for them."""

    def __init__(self, layer: Layer, tokens: int, dtype: str, states: int) -> None:
        self.layer, self.dtype = layer, dtype
        self._rng = rng = np.random.default_rng(0)
        heads, rows, columns = layer.heads, layer.rows, layer.columns
        shape = (heads, rows) if layer.kind == "conv" else (heads, rows, columns)
        start = rng.standard_normal(shape, dtype=np.float32)
        stored = encode_bfloat16(start) if dtype == "bfloat16" else start
        self.states = [aligned_copy(stored) for _ in range(states)]
        if layer.kind == "mamba":
            self.inputs = {
                "x": self._normal(tokens, heads, rows),
                "dt": np.exp(self._normal(tokens, heads) - 3),
                "A": -np.exp(self._normal(heads)),
                "B": self._normal(tokens, 1, columns),
                "C": self._normal(tokens, 1, columns),
                "D": self._normal(heads),
            }
        elif layer.kind == "conv":
            self.inputs = {
                "x": self._normal(tokens, heads),
                "weight": self._normal(heads, rows),
            }
        else:
            channels = (rows,) if layer.kind == "kda" else ()
            self.inputs = {
                "query": self._normal(tokens, heads, rows),
                "key": self._normal(tokens, heads, rows),
                "value": self._normal(tokens, heads, columns),
                "gate": -np.exp(self._normal(tokens, heads, *channels) - 3),
                "beta": rng.uniform(0, 1, (tokens, heads)).astype(np.float32),
            }

    def _normal(self, *shape: int) -> np.ndarray:
        return self._rng.standard_normal(shape, dtype=np.float32)

    @property
    def state_bytes(self) -> int:
        """Bytes of one state."""
        return self.states[0].nbytes

    def kvedge(self, threads: int) -> Step:
        """``extend`` of kvedge's class, which checks its arguments as always."""
        layer = self.layer
        states = [self._state(array).extend for array in self.states]
        options: dict[str, Any] = {"num_threads": threads}
        if layer.kind in ("delta", "kda"):
            options["normalize"] = True
        if layer.kind == "conv":
            options["activation"] = "silu"
        shape = self.inputs["value" if "value" in self.inputs else "x"].shape
        arguments = {**self.inputs, **options, "out": np.empty(shape, np.float32)}
        return lambda number: states[number](**arguments)

    def _state(self, array: np.ndarray) -> Any:
        layer = self.layer
        more: dict[str, Any] = {"array": array, "dtype": self.dtype}
        if layer.kind == "conv":
            return kvedge.ConvState(layer.heads, layer.rows, **more)
        kind = kvedge.MambaState if layer.kind == "mamba" else kvedge.DeltaState
        return kind(layer.heads, layer.rows, layer.columns, **more)

    def memory(self) -> Step:
        """Read every byte of a state and write it: one pass of NumPy's, on one thread."""
        plain = [array.reshape(-1).view(np.float32) for array in self.states]
        factor = np.float32(1.0)
        return lambda number: np.multiply(plain[number], factor, out=plain[number])

    def torch(self) -> Step:
        """Transformers' functions, with what its cache does to the state; on torch's threads."""
        import torch
        from transformers.utils import logging

        logging.set_verbosity_error()  # each of them tells that it is slow
        dtype = getattr(torch, self.dtype)
        self._t = {k: torch.from_numpy(a)[None].to(dtype) for k, a in self.inputs.items()}
        state_dtype = torch.float32 if self.layer.kind != "conv" else dtype
        shape = self.states[0].shape
        self.torch_states = [torch.randn((1, *shape)).to(state_dtype) for _ in self.states]
        steps = {"mamba": self._torch_mamba, "conv": self._torch_conv}
        step = steps.get(self.layer.kind, self._torch_delta)()

        def run(number: int) -> object:
            with torch.inference_mode():
                return step(self.torch_states[number])

        return run

    def _torch_delta(self) -> Callable[[Any], object]:
        t = self._t
        if self.layer.kind == "kda":
            from transformers.models.kimi_linear import modeling_kimi_linear as models

            token, prompt = (
                models.recurrent_kimi_delta_attention, models.chunk_kimi_delta_attention,
            )  # fmt: skip
        else:
            from transformers.models.qwen3_5 import modeling_qwen3_5 as models

            token, prompt = (
                models.torch_recurrent_gated_delta_rule, models.torch_chunk_gated_delta_rule,
            )  # fmt: skip
        function = token if t["query"].shape[1] == 1 else prompt

        def step(state: Any) -> object:
            out, new = function(
                t["query"], t["key"], t["value"], g=t["gate"].float(), beta=t["beta"],
                initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True,
            )  # fmt: skip
            state.copy_(new)
            return out

        return step

    def _torch_mamba(self) -> Callable[[Any], object]:
        import torch
        from transformers.models.granitemoehybrid import modeling_granitemoehybrid as models

        t, layer = self._t, self.layer
        x, a, d = t["x"], t["A"][0].float(), t["D"][0]
        dt = t["dt"].expm1().log()  # before softplus
        bias = torch.zeros(layer.heads, dtype=x.dtype)

        def token(state: Any) -> object:
            shape = (layer.heads, layer.rows)
            return models.mamba2_selective_state_update(
                state, x[:, 0], dt[:, 0, :, None].expand(1, *shape),
                a[:, None, None].expand(*shape, layer.columns), t["B"][:, 0], t["C"][:, 0],
                d[:, None].expand(shape), dt_bias=bias[:, None].expand(shape), dt_softplus=True,
            )  # fmt: skip

        def prompt(state: Any) -> object:
            out, new = models.mamba2_chunk_scan(
                x, dt, a, t["B"], t["C"], chunk_size=256, D=d, dt_bias=bias, dt_softplus=True,
                initial_states=state, return_final_states=True,
            )  # fmt: skip
            state.copy_(new)
            return out

        return token if x.shape[1] == 1 else prompt

    def _torch_conv(self) -> Callable[[Any], object]:
        import torch
        from transformers.models.qwen3_5 import modeling_qwen3_5 as models

        x, weight = self._t["x"].transpose(1, 2), self._t["weight"][0]

        def token(state: Any) -> object:
            return models.causal_conv1d_update(x, state, weight, None, "silu")

        def prompt(state: Any) -> object:
            whole = torch.cat([state, x], dim=-1)
            state.copy_(whole[..., -state.shape[-1] :])
            return models.causal_conv1d_fn(whole, weight, None, activation="silu")

        return token if x.shape[2] == 1 else prompt
