"""The decode loop of a model runtime, with kvedge in the place of its key/value cache.

The "model" here is random matrices of a Llama's shape: what matters is where the cache is called.
For a loop with a real model see kvedge/llama/model.py.

    python examples/decode_loop.py
"""

import numpy as np

from kvedge import KVCache

NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, VOCAB = 4, 8, 2, 32, 100
DIM = NUM_HEADS * HEAD_DIM

rng = np.random.default_rng(0)


def matrix(rows: int, columns: int) -> np.ndarray:
    return rng.standard_normal((rows, columns), dtype=np.float32) / np.sqrt(np.float32(rows))


embedding = rng.standard_normal((VOCAB, DIM), dtype=np.float32)
output = matrix(DIM, VOCAB)
layers = [
    {
        "q": matrix(DIM, DIM),
        "k": matrix(DIM, NUM_KV_HEADS * HEAD_DIM),
        "v": matrix(DIM, NUM_KV_HEADS * HEAD_DIM),
        "out": matrix(DIM, DIM),
    }
    for _ in range(NUM_LAYERS)
]


def forward(tokens: list[int], cache: KVCache) -> np.ndarray:
    """Run tokens through the model; logits (VOCAB,) after the last of them."""
    n = len(tokens)
    x = embedding[tokens]  # (n, DIM)
    for index, layer in enumerate(layers):
        normed = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-5)
        query = (normed @ layer["q"]).reshape(n, NUM_HEADS, HEAD_DIM)
        keys = (normed @ layer["k"]).reshape(n, NUM_KV_HEADS, HEAD_DIM)
        values = (normed @ layer["v"]).reshape(n, NUM_KV_HEADS, HEAD_DIM)
        # A real model turns query and keys to their positions (RoPE) here.
        cache.append(index, keys, values)  # quantized; seen by the next line
        attended = cache.attend(index, query)  # causal: (n, NUM_HEADS, HEAD_DIM)
        x = x + attended.reshape(n, DIM) @ layer["out"]
    cache.advance(n)  # every layer has the tokens: they count from now on
    return x[-1] @ output


def main() -> None:
    cache = KVCache(NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM)  # int8, growing

    # The prompt in one go, then token by token.
    logits = forward([1, 7, 42, 5], cache)
    text = []
    for _ in range(20):
        text.append(int(logits.argmax()))
        logits = forward(text[-1:], cache)
    print("text:", text)
    print(cache)
    print(f"{cache.used_bytes} bytes in use, {cache.compression_ratio:.2f}x less than float32")

    # Speculative decoding: try a draft, and go back to where it was good. Nothing is copied.
    snapshot = cache.snapshot()
    forward([3, 1, 4, 1, 5], cache)
    cache.restore(snapshot)
    assert len(cache) == 24
    print("after a rejected draft:", int(forward([text[-1]], cache).argmax()))

    # A context that is full: keep the first tokens ("attention sinks") and the newer half. A model
    # with RoPE then calls cache.shift(-dropped, rope=..., start=4) to turn the keys.
    cache.keep([*range(4), *range(len(cache) // 2, len(cache))])
    print("after dropping the older half:", cache)


if __name__ == "__main__":
    main()
