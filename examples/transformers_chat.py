"""A chat with a local checkpoint of Hugging Face transformers; its past is kept in a KvedgeCache.

Each turn gives the model the whole conversation; what the cache holds of it is not computed again.

    python examples/transformers_chat.py DIR
    python examples/transformers_chat.py DIR --say "What is a cache?" --save talk
    python examples/transformers_chat.py DIR --load talk

DIR as `hf download NAME --local-dir DIR` makes it. Needs: pip install 'kvedge[transformers]'.
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from kvedge.transformers import KvedgeCache, cache_argument


def conversation_ids(tokenizer, messages, before):
    """Token ids of all messages, (1, tokens); `before` are those of the turns before the last."""
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    first = before is None  # a model that goes on with a text: what is said is put behind it
    ids = tokenizer(messages[-1]["content"], add_special_tokens=first)["input_ids"]
    ids = torch.tensor([ids], dtype=torch.int64)
    return ids if first else torch.cat([before, ids], 1)


def said(options):
    """What the user says, turn by turn."""
    yield from options.say
    while not options.say:
        try:
            yield input("> ")
        except EOFError:
            return


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", metavar="DIR", help="folder of a checkpoint")
    parser.add_argument(
        "--say", action="append", default=[], help="a turn, instead of the keyboard"
    )
    parser.add_argument("--tokens", type=int, default=256, help="new tokens in an answer at most")
    parser.add_argument("--dtype", default="auto", help="how keys and values are stored")
    parser.add_argument("--load", metavar="FOLDER", help="a saved conversation to go on with")
    parser.add_argument("--save", metavar="FOLDER", help="where to write the conversation")
    options = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(options.model, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(
        options.model, dtype="auto", attn_implementation="kvedge", local_files_only=True
    )
    messages, ids = [], None
    if options.save:  # before the talk, not after it
        Path(options.save).mkdir(parents=True, exist_ok=True)
    if options.load:
        cache = KvedgeCache.load(options.load, model)
        talk = json.loads(Path(options.load, "messages.json").read_text())
        messages, ids = talk["messages"], torch.tensor(talk["ids"])
        print(f"{len(messages) // 2} turns, {cache.get_seq_length()} tokens loaded")
    else:
        cache = KvedgeCache(model.config, options.dtype)

    for text in said(options):
        messages.append({"role": "user", "content": text})
        prompt = conversation_ids(tokenizer, messages, ids)
        try:
            kept = cache.keep_prefix(prompt)
        except ValueError:  # the template changed an early turn, and no checkpoint is before it
            cache.reset()
            kept = 0
        ids = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            **{cache_argument(model): cache},
            max_new_tokens=options.tokens,
            streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
            pad_token_id=tokenizer.eos_token_id,
        )
        cache.token_ids = ids
        answer = tokenizer.decode(ids[0, prompt.shape[1] :], skip_special_tokens=True)
        messages.append({"role": "assistant", "content": answer})
        computed = prompt.shape[1] - kept
        print(f"[{kept} tokens kept, {computed} computed; {cache.memory_bytes / 1e6:.2f} MB]")

    if options.save and messages:
        cache.save(options.save, model=model)
        talk = {"messages": messages, "ids": ids.tolist()}  # one id more than the cache has tokens
        Path(options.save, "messages.json").write_text(json.dumps(talk))


if __name__ == "__main__":
    main()
