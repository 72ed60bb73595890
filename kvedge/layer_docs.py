"""Docstrings of the public layer classes and their methods, the same in both backends."""

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

PUSH_DOC = """Append one token.

Parameters
----------
keys, values : array
    float32 (num_kv_heads, head_dim) or flat; float16 and bfloat16 are converted.

Raises
------
CapacityExceededError, ShapeMismatchError, DtypeMismatchError, LayoutError
NonFiniteInputError, ScaleRangeError, ReadOnlyLayerError
    Nothing has changed.
"""

EXTEND_DOC = """Append any number of tokens: all of them or none.

Parameters
----------
keys, values : array
    float32 (n, num_kv_heads, head_dim); float16 and bfloat16 are converted.

Raises
------
CapacityExceededError, ShapeMismatchError, DtypeMismatchError, LayoutError
NonFiniteInputError, ScaleRangeError, ReadOnlyLayerError
    Nothing has changed.
"""

ATTEND_DOC = """Attention of query rows over the tokens stored.

Query head h reads KV head h // (num_heads // num_kv_heads). Row i of n stands at position
p = len - n + i. A row that may see nothing gives zeros.

Parameters
----------
query : array
    float32 (num_heads, head_dim) for the last token, or (n, num_heads, head_dim) for the
    last n; num_heads a multiple of num_kv_heads.
scale : float, optional
    Factor of the dot products; by default 1 / sqrt(head_dim).
causal : bool
    A row sees tokens t <= p; else all.
window : int, optional
    A row sees tokens t > p - window only.
sinks : int or array, optional
    int: so many first tokens stay visible besides the window (StreamingLLM,
    https://arxiv.org/abs/2309.17453). float32 (num_heads,): logits whose exp() joins the
    softmax denominator (gpt-oss).
softcap : float, optional
    c: logits become c * tanh(logit / c).
mask : array, optional
    bool (True: visible) or float32 that is added (-inf hides), broadcast to (num_heads, n,
    len); for one row also (num_heads, len).
alibi_slopes : array, optional
    float32 (num_heads,): slope * (t - p) is added (https://arxiv.org/abs/2108.12409).
precision_bits : 8, 16 or 24, optional
    Bits of queries and probabilities in integer products. By default 16 where the contract (an
    error of 2e-4 of the largest output) allows, else 24: for queries where logits are small
    enough, for probabilities past the first 1,024 tokens if head_dim is 64 or more. Fewer are
    faster: 16 adds errors of about 1e-4, 8 of about 1e-2, as much as storing in 8 bits does; 24
    about 1e-6. See docs/numerics.md. No effect on paths that multiply floats (scalar, neon,
    NumPy); avx2, avxvnni and neondot take 8 for 16.
return_lse : bool
    Return the logarithm of each softmax denominator, learned sinks included, as well; with
    it, :func:`kvedge.merge_attention` merges results over parts of a context.
out : numpy.ndarray, optional
    float32, shaped as the query, to write to; it may overlap nothing that is read.
num_threads : int, optional
    At most so many; by default see :func:`kvedge.set_num_threads`. The result does not depend
    on it. Has no effect on the NumPy backend.

Returns
-------
out : numpy.ndarray
    float32, shaped as the query.
lse : numpy.ndarray
    With `return_lse`: float32 (num_heads,) or (n, num_heads); -inf for a row that sees
    nothing.

Raises
------
InvalidArgumentError
    The layer is empty, or arguments do not fit together.
ShapeMismatchError, DtypeMismatchError, LayoutError, NonFiniteInputError
"""

SCORES_DOC = """Scaled logits of one query row, before softcap, bias, mask and softmax.

Parameters
----------
query : array
    float32 (num_heads, head_dim).
scale : float, optional
    By default 1 / sqrt(head_dim).

Returns
-------
numpy.ndarray
    float32 (num_heads, len).

Raises
------
ShapeMismatchError, DtypeMismatchError, LayoutError, NonFiniteInputError
"""


def document(core: type) -> None:
    """Give the methods that each backend's core writes out their docstrings."""
    docs = {"push": PUSH_DOC, "extend": EXTEND_DOC, "attend": ATTEND_DOC, "scores": SCORES_DOC}
    for name, text in docs.items():
        getattr(core, name).__doc__ = text
