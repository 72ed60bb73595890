"""Docstrings of the public layer classes, the same in both backends."""

QUANTIZED_DOC = """Keys and values of one layer, stored as int8 with one float scale per group.

Parameters
----------
capacity : int
    Tokens to reserve room for; memory is committed by the system as it is touched.
num_kv_heads : int
head_dim : int
    1 to 1024.
group_size : int, optional
    Channels that share a scale; by default the whole row of head_dim.
scale_dtype : {"float32", "float16"}
    float16 halves the scales, and refuses rows whose scale it cannot hold.
key_offset : array or "auto", optional
    float32 (num_kv_heads, head_dim), taken off the keys when stored and added back when read, for
    models whose keys have large constant channels. "auto": the mean of the keys of the first
    append, until clear().

Raises
------
InvalidArgumentError, OutOfMemoryError
DtypeMismatchError, ShapeMismatchError, LayoutError, NonFiniteInputError
    From key_offset.

Examples
--------
>>> layer = QuantizedKvLayer(4096, num_kv_heads=8, head_dim=64)
>>> layer.push(keys, values)  # float32 (8, 64) each
>>> out = layer.attend(query)  # float32 (32, 64) -> (32, 64)
"""

FLOAT32_DOC = """Keys and values of one layer, stored as they come, in float32.

Parameters
----------
capacity : int
    Tokens to reserve room for; memory is committed by the system as it is touched.
num_kv_heads : int
head_dim : int
    1 to 1024.

Raises
------
InvalidArgumentError, OutOfMemoryError
"""
