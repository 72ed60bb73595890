"""What states in fewer bytes cost a small delta net, which this trains first: loss and KL.

    python bench/state_formats.py TEXT... --minutes 8 --save build/delta_net.pt
    python bench/state_formats.py TEXT... --load build/delta_net.pt --context 32768

No trained model with states is small enough to come along, so one is made: Qwen3.5's layers (three
gated delta nets to one of full attention), a vocabulary of bytes, on the first nine tenths of the
texts. What is measured is the end of the first text, read byte by byte, so that a state is rounded
at each, as in writing; against a run whose states are float32. The runs are rows of one batch, with
keys and values in int8; rounding is what ``KvedgeCache(state_dtype=)`` does. Needs torch and
transformers.
"""

import argparse
import time
from pathlib import Path

import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from kvedge.transformers import KvedgeCache, accelerate
from kvedge.transformers.kept_states import Int8State

# What a state is after it was kept in a type.
FORMATS = {
    "float32": lambda state: state,
    "bfloat16": lambda state: state.bfloat16().float(),
    "int8": lambda state: Int8State.of(state).decoded(),
}
HELD_BACK = 0.1  # of each text, at its end
LENGTH, BATCH = 512, 4  # of a step of training, in bytes
RATE, WARM_UP = 3e-3, 50  # steps
EDGES = (1024, 4096, 16384, 32768)  # tokens, where a range of positions ends


def new_model():
    """1.9 million weights: six delta nets and two layers of attention."""
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        max_position_embeddings=65536,
        tie_word_embeddings=True,
    )
    return Qwen3_5ForCausalLM(config)


def read(paths):
    """What to learn from, and what is held back, of each text."""
    texts = [
        torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.uint8) for path in paths
    ]
    cuts = [int(len(text) * (1 - HELD_BACK)) for text in texts]
    return (
        torch.cat([text[:cut] for text, cut in zip(texts, cuts, strict=True)]).long(),
        [text[cut:].long() for text, cut in zip(texts, cuts, strict=True)],
    )


def train(model, text, minutes):
    """Train for so long by the processor's clock; the rate falls to zero."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.05)
    generator = torch.Generator().manual_seed(1)
    began, step, loss = time.process_time(), 0, None
    while (share := (time.process_time() - began) / 60 / minutes) < 1:
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1, (step + 1) / WARM_UP) * (1 - share)
        starts = torch.randint(0, len(text) - LENGTH - 1, (BATCH,), generator=generator)
        ids = torch.stack([text[start : start + LENGTH] for start in starts])
        now = model(input_ids=ids, labels=ids, use_cache=False).loss
        now.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss = now.item() if loss is None else 0.95 * loss + 0.05 * now.item()
        step += 1
        if step % 20 == 0:
            print(f"step {step}, {share:.0%} of the time, loss {loss:.3f}", flush=True)


@torch.inference_mode()
def measure(model, text, context):
    """Loss and KL of each format at each position, nats."""
    cache = KvedgeCache(model.config, dtype="int8", checkpoints=0)
    losses, divergences = torch.zeros(2, len(FORMATS), context, dtype=torch.float64)
    for at in range(context):
        ids = text[at].expand(len(FORMATS), 1)
        logs = model(input_ids=ids, past_key_values=cache).logits[:, -1].double().log_softmax(-1)
        losses[:, at] = -logs[:, text[at + 1]]
        divergences[:, at] = (logs[0].exp() * (logs[0] - logs)).sum(-1)
        for layer in cache.layers:
            if (state := getattr(layer, "recurrent_states", {}).get(0)) is not None:
                for row, kept in zip(state, FORMATS.values(), strict=True):
                    row.copy_(kept(row))
        if (at + 1) % 2048 == 0:
            print(f"{at + 1} tokens", flush=True)
    return losses, divergences


def report(losses, divergences, context):
    """Markdown: for each range of positions the loss beside float32's, and the KL."""
    edges = sorted({min(edge, context) for edge in EDGES})
    ranges = list(zip([0, *edges], edges, strict=False))
    print("| states | " + " | ".join(f"to {end:,} tokens" for _, end in ranges) + " |")
    print("|:--|" + "--:|" * len(ranges))
    for row, name in enumerate(FORMATS):
        cells = []
        for start, end in ranges:
            loss = losses[row, start:end].mean()
            more = loss - losses[0, start:end].mean()
            kl = divergences[row, start:end].mean()
            cells.append(f"{loss:.4f}" if name == "float32" else f"{more:+.5f}, {kl:.1e}")
        print(f"| {name} | " + " | ".join(cells) + " |")


def main():
    """Train or load, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("texts", nargs="+")
    parser.add_argument("--minutes", type=float, default=8, help="of training, one thread")
    parser.add_argument("--context", type=int, default=32768, help="bytes of text; 0: train alone")
    parser.add_argument("--save", help="the trained weights")
    parser.add_argument("--load", help="weights that were trained before")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, (text, held_back) = new_model(), read(options.texts)
    if options.load:
        model.load_state_dict(torch.load(options.load))
    else:
        train(model, text, options.minutes)
    if options.save:
        torch.save(model.state_dict(), options.save)
    if options.context:
        model.set_attn_implementation("kvedge")
        accelerate(model.eval())
        report(*measure(model, held_back[0], options.context), options.context)


if __name__ == "__main__":
    main()
