"""Recall of a trained indexer's choice with index keys in int8 and bfloat16.

python bench/index_recall.py --text A.txt B.txt --weights FILE [--minutes 8]

Trains a small byte-level transformer, unless FILE is there. Each layer has two indexers, trained
by the KL divergence from attention's distribution as DeepSeek V3.2's is (their inputs detached):
"DSA", a key for each token and weights of the heads; "QSA", a key for 4 tokens (their mean,
normed, then RoPE at the first token) and no weights. Prints for each context, on text that was
not trained on: recall of what float32 keys choose, and the softmax mass of attention (mean over
heads and rows) outside of the lists.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvedge.key_index import IndexDtype, KeyIndex

DIM, LAYERS, HEADS, INDEX_HEADS, INDEX_DIM = 128, 2, 4, 4, 64
RATIOS = {"DSA": 1, "QSA": 4}
SCALE = INDEX_DIM**-0.5
ROWS = 256  # of a text, the last, that are measured


def rope(x: Tensor, positions: Tensor) -> Tensor:
    """RoPE of x (..., n, dim) at positions (n,)."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * 10000.0 ** (-torch.arange(half) / half)
    a, b = x.split(half, dim=-1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


class Indexer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.ratio = RATIOS[kind]
        self.query = nn.Linear(DIM, INDEX_HEADS * INDEX_DIM, bias=False)
        self.key = nn.Linear(DIM, INDEX_DIM, bias=False)
        self.norm = nn.LayerNorm(INDEX_DIM)
        self.weights = nn.Linear(DIM, INDEX_HEADS, bias=False) if kind == "DSA" else None

    def queries(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Queries (batch, n, INDEX_HEADS, INDEX_DIM) and weights (batch, n, INDEX_HEADS)."""
        query = self.query(x).unflatten(-1, (INDEX_HEADS, INDEX_DIM)).transpose(1, 2)
        query = rope(query, torch.arange(x.shape[1])).transpose(1, 2)
        return query, query.new_ones(query.shape[:3]) if self.weights is None else self.weights(x)

    def finish(self, means: Tensor, positions: Tensor) -> Tensor:
        return rope(self.norm(means), positions)

    def loss(self, x: Tensor, attention: Tensor) -> Tensor:
        """KL divergence of scores from attention (batch, n, n), both over visible keys."""
        n = x.shape[1]
        means = self.key(x).unflatten(1, (-1, self.ratio)).mean(2)
        firsts = torch.arange(0, n, self.ratio)
        query, weights = self.queries(x)
        products = torch.einsum("bnhd,bkd->bhnk", query, self.finish(means, firsts))
        scores = torch.einsum("bhnk,bnh->bnk", F.relu(products * SCALE), weights)
        hidden = firsts + self.ratio - 1 > torch.arange(n)[:, None]
        target = attention.unflatten(2, (-1, self.ratio)).sum(3).masked_fill(hidden, 0)
        target = (target / target.sum(-1, keepdim=True).clamp(min=1e-9))[:, self.ratio - 1 :]
        log = scores.masked_fill(hidden, -1e9).log_softmax(-1)[:, self.ratio - 1 :]
        return F.kl_div(log, target, reduction="sum") / log.shape[:2].numel()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)
        self.indexers = nn.ModuleDict({kind: Indexer(kind) for kind in RATIOS})

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The layer's output, its normed input and attention's weights (batch, HEADS, n, n)."""
        n = x.shape[1]
        normed = self.norm(x)
        qkv = self.qkv(normed).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        query, key = rope(qkv[:2], torch.arange(n))
        logits = query @ key.transpose(-1, -2) * (DIM // HEADS) ** -0.5
        hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
        attention = logits.masked_fill(hidden, -torch.inf).softmax(-1)
        x = x + self.out((attention @ qkv[2]).transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.up(self.mlp_norm(x)))), normed, attention


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(DIM), nn.Linear(DIM, 256, bias=False)

    def loss(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Nats of a byte, and the sum of the indexers' losses."""
        x, divergence = self.embedding(tokens[:, :-1]), torch.zeros(())
        for layer in self.layers:
            x, normed, attention = layer(x)
            target = attention.detach().mean(1)
            for indexer in layer.indexers.values():
                divergence = divergence + indexer.loss(normed.detach(), target)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()), divergence


def train(model: Model, texts: list[Tensor], minutes: float) -> None:
    """Three quarters of the time on texts of 1,024 bytes, the rest on texts of 4,096."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    start, step, part = time.monotonic(), 0, 0.0
    while part < 1:
        length, batch = (1024, 2) if part < 0.75 else (4096, 1)
        rows = []
        for i in range(batch):
            text = texts[(step + i) % len(texts)]
            first = int(torch.randint(len(text) - length, ()))
            rows.append(text[first : first + length + 1])
        loss, divergence = model.loss(torch.stack(rows))
        optimizer.zero_grad()
        (loss + divergence).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1, step / 20) * (1 - 0.95 * part)
        optimizer.step()
        part = (time.monotonic() - start) / (60 * minutes)
        if step % 20 == 0 or part >= 1:
            print(f"step {step}, {length}: {loss:.3f} nats, KL {divergence:.3f}", flush=True)
        step += 1


def lists_of(indexer: Indexer, x: Tensor, dtype: IndexDtype, budget: int) -> np.ndarray:
    """The lists (ROWS, width) of the last rows of x (1, n, DIM)."""
    index = KeyIndex(None, INDEX_DIM, ratio=indexer.ratio, dtype=dtype)

    def finish(means: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return indexer.finish(torch.from_numpy(means), torch.from_numpy(positions)).numpy()

    index.append(indexer.key(x)[0].numpy(), finish)
    query, weights = (of[0, -ROWS:].numpy() for of in indexer.queries(x))
    return index.select(query, budget // indexer.ratio, weights=weights, scale=SCALE)


def chosen(lists: np.ndarray, n: int) -> Tensor:
    """Whether a row's list has a token: bool (ROWS, n)."""
    is_chosen = np.zeros((len(lists), n + 1), bool)
    np.put_along_axis(is_chosen, lists, True, axis=1)  # -1: the column that is cut off
    return torch.from_numpy(is_chosen[:, :n])


@torch.inference_mode()
def measure(model: Model, texts: list[Tensor], context: int, budget: int) -> None:
    dtypes: tuple[IndexDtype, ...] = ("float32", "bfloat16", "int8")
    found: dict[tuple[str, int, str], list[tuple[float, float]]] = {}
    for text in texts:
        for tokens in text[: len(text) // context * context].view(-1, context)[:4]:
            x = model.embedding(tokens)[None]
            for number, layer in enumerate(model.layers):
                x, normed, attention = layer(x)
                rows = attention[0, :, -ROWS:]
                for kind, indexer in layer.indexers.items():
                    best = None
                    for dtype in dtypes:
                        of = chosen(lists_of(indexer, normed, dtype, budget), context)
                        best = of if best is None else best
                        recall = (of & best).sum() / best.sum()
                        lost = rows.masked_fill(of, 0).sum(-1).mean()
                        found.setdefault((kind, number, dtype), []).append((recall, lost))
    for (kind, number, dtype), values in found.items():
        recall, lost = np.mean(values, axis=0)
        extra = lost - np.mean(found[kind, number, "float32"], axis=0)[1]
        print(
            f"| {context:,} | {budget} | {kind} | {number} | {dtype} "
            f"| {recall:.4f} | {lost:.5f} | {extra:+.1e} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--weights", type=Path, required=True, help="read, or written")
    parser.add_argument("--minutes", type=float, default=8, help="of training (%(default)s)")
    parser.add_argument("--context", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--budget", type=int, nargs="+", default=[128, 256], help="tokens")
    options = parser.parse_args()
    texts = [torch.tensor(list(path.read_bytes())) for path in options.text]
    parts = [text.split(int(0.95 * len(text))) for text in texts]
    torch.manual_seed(0)
    model = Model()
    if options.weights.exists():
        model.load_state_dict(torch.load(options.weights))
    else:
        train(model, [part[0] for part in parts], options.minutes)
        torch.save(model.state_dict(), options.weights)
    print("| context | budget | indexer | layer | keys | recall | lost | more than float32 |")
    print("|--:|--:|:--|--:|:--|--:|--:|--:|")
    for context in options.context:
        for budget in options.budget:
            measure(model, [part[1] for part in parts], context, budget)


if __name__ == "__main__":
    main()
