"""Several conversations with one system prompt, which is computed and kept in memory once.

The small model that comes with kvedge tells stories instead of chatting; the bookkeeping is that of
a server: every prompt is looked up by its token ids, what is known is shared, only the rest is run
through the model, and each conversation goes on in blocks of its own.

    python examples/chat_server.py
    python examples/chat_server.py --conversations 16 --tokens 60 --block-size 32
"""

import argparse
import time
from dataclasses import dataclass, field

import numpy as np

from kvedge import KvBlockPool, PagedKvCache
from kvedge.data import STORIES_MODEL, STORIES_TOKENIZER
from kvedge.llama import LlamaModel

SYSTEM_PROMPT = (
    "Once upon a time, there was a little girl named Lily. She lived in a small house near a big "
    "forest with her mom, her dad and her little brother Tim. Every day, Lily and Tim liked to "
    "play outside in the sun. They had a red ball, a blue kite and a brown dog named Max. Max "
    'liked to run and jump. One day, mom said, "Do not go too far, it will be dark soon." '
)
OPENINGS = (
    "Lily saw a cat.",
    "Tim found a shiny key.",
    "Max ran into the forest.",
    "A big bird took the kite.",
    "Lily lost the red ball.",
    "Dad made a cake.",
    "It started to rain.",
    "Tim was sad.",
)


@dataclass
class Conversation:
    """One sequence of a PagedKvCache, with the methods of a KVCache that the model calls."""

    cache: PagedKvCache
    seq: int
    token_ids: list[int] = field(default_factory=list)
    max_seq_len = None  # the pool is the limit

    def __len__(self) -> int:
        return self.cache.length(self.seq)

    @property
    def num_layers(self) -> int:
        return self.cache.pool.num_layers

    @property
    def num_kv_heads(self) -> int:
        return self.cache.pool.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.cache.pool.head_dim

    def append(self, layer: int, keys: np.ndarray, values: np.ndarray) -> None:
        self.cache.append(self.seq, layer, keys, values)

    def attend(self, layer: int, query: np.ndarray, **options) -> np.ndarray:
        return self.cache.attend(self.seq, layer, query, **options)

    def advance(self, n: int = 1) -> None:
        self.cache.advance(self.seq, n)

    def truncate(self, n: int) -> None:
        self.cache.truncate(self.seq, n)


class Server:
    """Conversations with a model, over one pool of blocks."""

    def __init__(self, model: LlamaModel, num_blocks: int, block_size: int, share: bool) -> None:
        c = model.config
        self.model = model
        self.share = share
        self.pool = KvBlockPool(num_blocks, block_size, c.num_layers, c.num_kv_heads, c.head_dim)
        self.cache = PagedKvCache(self.pool)
        self.tokens_run = 0  # through the model, of prompts

    def start(self, prompt: str) -> tuple[Conversation, int]:
        """Begin a conversation: it, and the first token of the answer."""
        ids = self.model.tokenizer.encode(prompt)
        # At least the last token has to be run: its logits tell what comes next.
        known = ids[:-1] if self.share else []
        seq, n = self.cache.match_prefix(known)
        conversation = Conversation(self.cache, seq, ids)
        logits = self.model.forward(ids[n:], conversation, last_only=True)
        self.tokens_run += len(ids) - n
        if self.share:
            self.cache.register(seq, ids)  # the next one will find it
        return conversation, int(logits.argmax())

    def answer(self, conversation: Conversation, token: int, num_tokens: int) -> str:
        """Go on for so many tokens."""
        first = len(conversation.token_ids)
        for _ in range(num_tokens):
            conversation.token_ids.append(token)
            logits = self.model.forward([token], conversation, last_only=True)
            token = int(logits.argmax())
        return self.model.tokenizer.decode(conversation.token_ids[first:])


def serve(model: LlamaModel, options: argparse.Namespace, share: bool) -> tuple[Server, list[str]]:
    """Hold all conversations; none is dropped, so that their memory can be counted."""
    blocks = -(-model.config.max_seq_len // options.block_size)
    server = Server(model, options.conversations * blocks, options.block_size, share)
    began = time.perf_counter()
    started = []
    for i in range(options.conversations):
        started.append(server.start(SYSTEM_PROMPT + OPENINGS[i % len(OPENINGS)]))
    prompts = time.perf_counter() - began
    answers = [server.answer(*conversation, options.tokens) for conversation in started]
    pool = server.pool
    print(
        f"{'with' if share else 'without'} sharing: {pool.used_count} blocks of "
        f"{pool.block_size} tokens, {pool.used_bytes / 1e3:.1f} kB; {server.tokens_run} tokens of "
        f"prompts run in {prompts * 1e3:.0f} ms"
    )
    return server, answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--conversations", type=int, default=8, metavar="N")
    parser.add_argument("--tokens", type=int, default=30, metavar="N", help="of each answer")
    parser.add_argument("--block-size", type=int, default=16, metavar="N")
    options = parser.parse_args()

    model = LlamaModel.from_file(STORIES_MODEL, STORIES_TOKENIZER)
    n = len(model.tokenizer.encode(SYSTEM_PROMPT))
    print(f"{options.conversations} conversations, system prompt of {n} tokens")
    alone, expected = serve(model, options, share=False)
    shared, answers = serve(model, options, share=True)
    saved = 1 - shared.pool.used_bytes / alone.pool.used_bytes
    print(f"memory saved: {saved:.0%}; same answers: {answers == expected}")
    for opening, answer in zip(OPENINGS, answers[:3], strict=False):
        print(f"\n> {opening}\n{answer.strip()}")

    # Conversations end; what they have in common stays to be found, and makes room when needed.
    for seq in shared.cache.sequences:
        shared.cache.drop(seq)
    pool = shared.pool
    print(
        f"\nall dropped: {pool.free_count} of {pool.num_blocks} blocks free, "
        f"{pool.cached_count} of them still known by their tokens"
    )


if __name__ == "__main__":
    main()
