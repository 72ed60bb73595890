"""ONNX Runtime's GroupQueryAttention, the operator of its generative models."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np

from kvedge.bench.peers.base import Competitor
from kvedge.bench.shapes import AttentionShape
from kvedge.bench.workload import Workload
from kvedge.core.packages import obstacle

__all__ = ["OrtGroupQueryAttention"]

_BYTES = {"fp32": 4, "int8": 1}
# Pull requests 28576 and 28578 of microsoft/onnxruntime: quantized caches on CPUs.
_INT8_SINCE = (1, 27)
_ONNX_OPSET = 21  # any that has the types; the operator itself is in the com.microsoft domain


class OrtGroupQueryAttention(Competitor):
    """A model of this one operator, with I/O binding; past and present share a buffer.

    The cache lies as (1, num_kv_heads, T, head_dim). The operator also appends the last token to it
    (the same one each time), as a decode step does: one row of T; or all tokens of a prompt.

    INT8 has one scale per channel for the whole context, here the best for these very keys and
    values; a model would carry scales found on other data.
    """

    package = "onnxruntime"
    module = "onnxruntime"

    def __init__(self, kind: str) -> None:
        super().__init__(f"ort-{kind}")
        self._kind = kind
        self._session: Any = None
        self._bindings: list[Any] = []
        self._outputs: list[Any] = []

    def unavailable(self) -> str | None:
        """The model is built with ``onnx``; INT8 needs a version that has it on CPUs."""
        missing = super().unavailable()
        if why := missing or obstacle("onnx"):
            return why
        if self._kind == "int8" and _release(self.version()) < _INT8_SINCE:
            least = ".".join(map(str, _INT8_SINCE))
            return f"onnxruntime {self.version()} has no INT8 cache on CPUs ({least} has)"
        return None

    def refuses(self, shape: AttentionShape) -> str | None:
        """The operator asks for whole groups of eight channels."""
        return f"head_dim {shape.head_dim} is no multiple of 8" if shape.head_dim % 8 else None

    def bytes_per_token(self, shape: AttentionShape) -> float:
        """Four bytes or one per value; the scales do not grow with the context."""
        return _BYTES[self._kind] * shape.values_per_token

    def prepare(self, workload: Workload, copies: int, num_threads: int) -> None:
        """Build the model and one binding per copy."""
        onnxruntime: Any = import_module("onnxruntime")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = num_threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3  # errors only
        keys, values = (
            np.ascontiguousarray(rows.swapaxes(0, 1)) for rows in (workload.keys, workload.values)
        )
        scales: list[np.ndarray] = []
        if self._kind == "int8":
            keys, key_scales = _quantize_channels(keys)
            values, value_scales = _quantize_channels(values)
            scales = [key_scales, value_scales]
        model = _model(workload, self._kind, scales)
        self._session = onnxruntime.InferenceSession(
            model, options, providers=["CPUExecutionProvider"]
        )
        value_of = onnxruntime.OrtValue.ortvalue_from_numpy
        inputs = {name: value_of(array) for name, array in _step_inputs(workload).items()}
        for _ in range(copies):
            # A copy of its own: OrtValues of NumPy arrays may look at the array's memory.
            past = {"key": value_of(keys[None].copy()), "value": value_of(values[None].copy())}
            self._bind(inputs, past, workload)

    def _bind(self, inputs: dict[str, Any], past: dict[str, Any], workload: Workload) -> None:
        onnxruntime: Any = import_module("onnxruntime")
        binding = self._session.io_binding()
        for name, value in inputs.items():
            binding.bind_ortvalue_input(name, value)
        for name, buffer in past.items():
            binding.bind_ortvalue_input(f"past_{name}", buffer)
            binding.bind_ortvalue_output(f"present_{name}", buffer)
        output = onnxruntime.OrtValue.ortvalue_from_numpy(
            np.empty((1, workload.num_rows, _width(workload)), np.float32)
        )
        binding.bind_ortvalue_output("output", output)
        self._bindings.append((binding, past))
        self._outputs.append((output, workload.query.shape))

    def run(self, copy: int) -> object:
        """Run the bound model."""
        self._session.run_with_iobinding(self._bindings[copy][0])
        return self._outputs[copy]

    def as_array(self, output: object) -> np.ndarray:
        """Read the bound output."""
        assert isinstance(output, tuple)
        value, shape = output
        return np.asarray(value.numpy()).reshape(shape)

    def release(self) -> None:
        """Drop the session and the buffers."""
        self._bindings, self._outputs, self._session = [], [], None


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def _quantize_channels(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantize (num_kv_heads, T, head_dim) with one scale per head and channel."""
    scales = np.abs(rows).max(axis=1, keepdims=True) / np.float32(127)
    scales[scales == 0] = 1
    codes = np.rint(rows / scales).astype(np.int8)
    return codes, scales[None].astype(np.float32)  # (1, num_kv_heads, 1, head_dim)


def _step_inputs(workload: Workload) -> dict[str, np.ndarray]:
    """One step: the queries, and their tokens as they will be appended."""
    rows = workload.num_rows
    return {
        "query": workload.query.reshape(1, rows, -1),
        "key": workload.keys[-rows:].reshape(1, rows, -1).copy(),
        "value": workload.values[-rows:].reshape(1, rows, -1).copy(),
        "seqlens_k": np.array([workload.context - 1], np.int32),  # by the operator's definition
        "total_sequence_length": np.array(workload.context, np.int32),
    }


def _width(workload: Workload) -> int:
    return workload.shape.num_heads * workload.shape.head_dim


def _model(workload: Workload, kind: str, scales: list[np.ndarray]) -> bytes:
    helper, numpy_helper = import_module("onnx.helper"), import_module("onnx.numpy_helper")
    types: Any = import_module("onnx").TensorProto
    cache_type = types.INT8 if kind == "int8" else types.FLOAT
    shape, rows = workload.shape, workload.num_rows
    cache = [1, shape.num_kv_heads, workload.context, shape.head_dim]
    row, kv_row = _width(workload), shape.num_kv_heads * shape.head_dim
    floats, ints = types.FLOAT, types.INT32
    inputs = [
        helper.make_tensor_value_info(name, kind_of, dims)
        for name, kind_of, dims in (
            ("query", floats, [1, rows, row]),
            ("key", floats, [1, rows, kv_row]),
            ("value", floats, [1, rows, kv_row]),
            ("past_key", cache_type, cache),
            ("past_value", cache_type, cache),
            ("seqlens_k", ints, [1]),
            ("total_sequence_length", ints, []),
        )
    ]
    outputs = [
        helper.make_tensor_value_info("output", floats, [1, rows, row]),
        helper.make_tensor_value_info("present_key", cache_type, cache),
        helper.make_tensor_value_info("present_value", cache_type, cache),
    ]
    names = [tensor.name for tensor in inputs]
    attributes: dict[str, Any] = {"num_heads": shape.num_heads, "kv_num_heads": shape.num_kv_heads}
    constants = []
    if kind == "int8":
        # Inputs 7 to 11 (rotary tables, positions, bias, sink) are left out.
        names += ["", "", "", "", "", "k_scale", "v_scale"]
        constants = [
            numpy_helper.from_array(array, name)
            for array, name in zip(scales, ("k_scale", "v_scale"), strict=True)
        ]
        attributes |= {
            "kv_cache_bit_width": 8,
            "k_quant_type": "PER_CHANNEL",
            "v_quant_type": "PER_CHANNEL",
        }
    node = helper.make_node(
        "GroupQueryAttention",
        names,
        [tensor.name for tensor in outputs],
        domain="com.microsoft",
        **attributes,
    )
    graph = helper.make_graph([node], "attention", inputs, outputs, constants)
    opsets = [helper.make_opsetid("", _ONNX_OPSET), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return bytes(model.SerializeToString())
