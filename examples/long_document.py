"""Many questions about a document, which a model of Hugging Face transformers reads once.

    python examples/long_document.py DIR report.txt --ask "Who wrote it?" --ask "What does it cost?"
    python examples/long_document.py DIR report.txt --read report.kv --ask "..."

The document's keys and values stay in a KvedgeCache. For each question it goes back to the end of
the document, where it has a checkpoint: layers with a window or a state could not go back without.
With --read the read document is kept in a folder, and later runs begin with it.

DIR as `hf download NAME --local-dir DIR` makes it. Needs: pip install 'kvedge[transformers]'.
"""

import argparse
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvedge.transformers import KvedgeCache, cache_argument

MARK = "\N{LEFT DOUBLE QUOTATION MARK}QUESTION\N{RIGHT DOUBLE QUOTATION MARK}"


def prompt_around(tokenizer, document):
    """What stands before a question, the document included, and what behind it."""
    if not tokenizer.chat_template:
        return document + "\n\n", "\n"
    turn = [{"role": "user", "content": f"{document}\n\n{MARK}"}]
    text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    before, _, behind = text.rpartition(MARK)
    return before, behind


def read_document(model, ids, options):
    """A cache that holds the document: from a folder, or computed in pieces."""
    if options.read and Path(options.read, "conversation.json").exists():
        cache = KvedgeCache.load(options.read, model)
        if torch.equal(cache.token_ids, ids):
            return cache
        print(f"{options.read} is of another document: it is read anew")
    if options.read:  # before the document is computed
        Path(options.read).mkdir(parents=True, exist_ok=True)
    cache = KvedgeCache(model.config, options.dtype)
    with torch.inference_mode():
        for piece in ids.split(512, dim=1):
            model(piece, logits_to_keep=1, **{cache_argument(model): cache})
    cache.token_ids = ids
    if options.read:
        cache.save(options.read, model=model)
    return cache


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", metavar="DIR", help="folder of a checkpoint")
    parser.add_argument("document", metavar="FILE", help="a text")
    parser.add_argument("--ask", action="append", required=True, help="a question")
    parser.add_argument("--read", metavar="FOLDER", help="where the read document is kept")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens in an answer at most")
    parser.add_argument("--dtype", default="auto", help="how keys and values are stored")
    options = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(options.model, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(
        options.model, dtype="auto", attn_implementation="kvedge", local_files_only=True
    )
    before, behind = prompt_around(tokenizer, Path(options.document).read_text())
    special = not tokenizer.chat_template  # a template writes them itself
    ids = tokenizer(before, add_special_tokens=special, return_tensors="pt")["input_ids"]

    start = time.perf_counter()
    cache = read_document(model, ids, options)
    cache.checkpoint()
    took = time.perf_counter() - start
    print(f"{ids.shape[1]} tokens in {took:.1f} s, {cache.memory_bytes / 1e6:.2f} MB")

    for question in options.ask:
        start = time.perf_counter()
        # Tokenized by itself: with the document, its tokens could end elsewhere.
        asked = tokenizer(question + behind, add_special_tokens=False, return_tensors="pt")
        prompt = torch.cat([ids, asked["input_ids"]], 1)
        kept = cache.keep_prefix(prompt)
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            **{cache_argument(model): cache},
            max_new_tokens=options.tokens,
            pad_token_id=tokenizer.eos_token_id,
        )
        cache.token_ids = out
        answer = tokenizer.decode(out[0, prompt.shape[1] :], skip_special_tokens=True)
        print(f"\n> {question}\n{answer}")
        print(f"[{kept} tokens kept, {time.perf_counter() - start:.1f} s]")


if __name__ == "__main__":
    main()
