"""``kvedge generate --hf``: a checkpoint of Hugging Face transformers on a KvedgeCache."""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

from kvedge.cli import ranks, sampling, storage
from kvedge.cli.figures import tokens_and_speed
from kvedge.cli.interrupts import code_of
from kvedge.console.exits import OK, CommandError, UsageError
from kvedge.console.output import Output, print_json
from kvedge.console.sizes import format_size
from kvedge.console.terminal import show
from kvedge.core import packages
from kvedge.store.prefix_store import PrefixStore

__all__ = ["add_options", "load", "run"]

_FOREIGN = (
    *("model", "tokenizer", "context", "window"),
    *("save_session", "load_session", "prompt_cache"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options that are for ``--hf`` alone."""
    group = parser.add_argument_group("Hugging Face (pip install 'kvedge[transformers]')")
    group.add_argument("--hf", metavar="DIR", help="folder of a local checkpoint")
    group.add_argument(
        "--gguf", metavar="FILE", help="GGUF file in that folder, which transformers loads"
    )
    group.add_argument(
        "--state-dtype",
        metavar="TYPE",
        choices=["float32", "bfloat16", "int8"],
        help="what recurrent states are kept as between tokens, in a model that has such: float32, "
        "bfloat16 or int8 (default: what the model computes)",
    )
    group.add_argument(
        "--no-chat", action="store_true", help="give the prompt as it is, without a chat template"
    )


def run(options: argparse.Namespace, output: Output) -> int:
    """Write the text and the summary."""
    _check(options)
    from kvedge.transformers import KvedgeCache  # says what is to be installed, if it is
    from kvedge.transformers._installed import cache_argument

    with output.status("loading the model"):
        model, tokenizer = load(options.hf, options.gguf)
    import torch

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    over = {}
    if options.group is not None:
        over = {"group": options.group, **ranks.placement_options(options)}
    stored = storage.cache_options(options)
    cache = KvedgeCache(
        model.config,
        precision_bits=options.precision_bits,
        eviction=options.evict,
        state_dtype=options.state_dtype,
        **_store_of(options),
        **over,
        **stored,
    )
    ranks.begun(options)
    chat = bool(tokenizer.chat_template) and not options.no_chat
    ids = _prompt(options.prompt or "", tokenizer, chat=chat)
    shown = 0 if chat else len(tokenizer.decode(ids[0], skip_special_tokens=True))
    stream = _Stream(tokenizer, shown, skip_prompt=chat, show=not options.json, stop=options.stop)
    settings = sampling.chosen(options, {"samplers": sampling.TRANSFORMERS_ORDER})
    sampling.note_what_is_idle(options, settings, output)
    arguments = _sampling_arguments(settings)
    seed = None
    if settings["temperature"] > 0:
        seed = sampling.seed_of(options)
        if options.group is not None:
            seed = ranks.shared_seed(options.group, seed)
        torch.manual_seed(seed)
    if options.group is not None:
        from transformers import LogitsProcessorList

        arguments["logits_processor"] = LogitsProcessorList([ranks.shared_logits(options.group)])
    if options.stop:
        arguments |= {"stop_strings": options.stop, "tokenizer": tokenizer}
    arguments[cache_argument(model)] = cache
    interrupt: KeyboardInterrupt | None = None
    try:
        if options.tokens == 0:
            stream.put(ids)
            model(ids, logits_to_keep=1, **{cache_argument(model): cache})
            stream.end()
        else:
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=_most(options.tokens, model, ids.shape[1]),
                streamer=stream,
                pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id or 0,
                **arguments,
            )
    except KeyboardInterrupt as came:
        interrupt = came
    summary = {
        "model": options.hf,
        "prompt": options.prompt or "",
        "text": stream.text[shown:],
        "tokens": stream.tokens,
        "prompt_tokens": ids.shape[1],
        "prompt_tokens_per_second": stream.prompt_speed(ids.shape[1]),
        "generated_tokens": len(stream.tokens),
        "tokens_per_second": stream.speed(),
        **sampling.figures(settings),
        "seed": seed,
        "engine": options.engine,
        "cache": {
            "dtype": storage.dtype_of(stored),
            "tokens": cache.get_seq_length(),
            "used_bytes": cache.memory_bytes,
        },
        "reused_tokens": cache.reused,
        "num_threads": torch.get_num_threads(),
        "interrupted": interrupt is not None,
    }
    if options.json:
        print_json(summary)
    else:
        show("\n")
        _print_summary(summary, output)
    return OK if interrupt is None else code_of(interrupt)


def _store_of(options: argparse.Namespace) -> dict[str, Any]:
    """The prefix store of a cache, if there is one."""
    if options.prompt_store is None:
        return {}
    store = PrefixStore(options.prompt_store, max_bytes=options.prompt_store_size)
    return {"store": store, "namespace": options.namespace or ""}


def _sampling_arguments(settings: dict[str, Any]) -> dict[str, Any]:
    """Arguments of transformers' ``generate`` for the settings."""
    arguments: dict[str, Any] = {"do_sample": False}
    if settings["temperature"] > 0:
        names = ("temperature", "top_k", "top_p", "min_p")
        arguments = {"do_sample": True, **{name: settings[name] for name in names}}
    if settings["repeat_penalty"] != 1:
        arguments["repetition_penalty"] = settings["repeat_penalty"]
    if settings["logit_bias"]:
        bias = settings["logit_bias"].items()
        arguments["sequence_bias"] = [[[token], value] for token, value in bias]
    return arguments


def _most(tokens: int, model: Any, prompt: int) -> int:
    """Tokens to write at most: for -1, what the model's context has room for."""
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return tokens if tokens != -1 else max((context or 4096) - prompt, 1)


def _check(options: argparse.Namespace) -> None:
    """Refuse options of the other models."""
    for name in _FOREIGN:
        if getattr(options, name):
            raise UsageError(f"--{name.replace('_', '-')} does not go with --hf")
    if options.on_full == "shift":
        raise UsageError("--on-full shift does not go with --hf")
    if options.repeat_last is not None:
        raise UsageError("--repeat-last does not go with --hf: transformers counts all tokens")
    if options.gguf is not None and not os.path.isfile(os.path.join(options.hf, options.gguf)):
        raise CommandError(f"{options.hf}: there is no file {options.gguf} in it")
    if not os.path.isdir(options.hf):
        raise CommandError(
            f"{options.hf}: no such folder (models are not downloaded: "
            "'hf download NAME --local-dir DIR' does that)"
        )


def load(folder: str, gguf: str | None = None, *, dtype: str = "auto") -> tuple[Any, Any]:
    """Return the model, in its own dtype unless another is named, and its tokenizer."""
    from kvedge.transformers._installed import require

    require()  # says what is to be installed, if it is
    names = ("AutoModelForCausalLM", "AutoTokenizer")
    transformers = packages.require("transformers", "--hf needs", needs=names)
    if gguf is not None:
        packages.require("accelerate", "transformers, which loads GGUF files, needs")
    more = {} if gguf is None else {"gguf_file": gguf}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            folder, local_files_only=True, **more
        )
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation="kvedge",
            local_files_only=True,
            **more,
        )
    except Exception as error:  # of any kind, where a file is damaged
        raise CommandError(f"{folder}: transformers cannot load it: {error}") from error
    return model.eval().requires_grad_(False), tokenizer


def _prompt(text: str, tokenizer: Any, *, chat: bool) -> Any:
    """Token ids of the prompt, (1, tokens); as a turn of a chat, in the model's template."""
    import torch

    if chat:
        turn = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=not chat)["input_ids"]
    if not ids:
        if tokenizer.bos_token_id is None:
            raise UsageError("the model has no token to begin with: give a --prompt")
        ids = [tokenizer.bos_token_id]
    return torch.tensor([ids])


class _Stream:
    """What ``generate`` calls with each token: the text goes out, and the time is noted.

    Up to a stop text, that is, behind the first `prompt` characters, which are the prompt's.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt: int,
        *,
        skip_prompt: bool,
        show: bool,
        stop: list[str] | None,
    ) -> None:
        from transformers import TextStreamer

        from kvedge.llama.text_stream import StopTexts

        self._of_prompt = prompt  # characters still to come
        self._until_stop = StopTexts(stop or ())

        self.tokens: list[int] = []
        self.text = ""
        self._start = time.perf_counter()
        self._times: list[float] = []
        self._end: float | None = None
        self._prompt = True
        self._pieces: Any = TextStreamer(
            tokenizer, skip_prompt=skip_prompt, skip_special_tokens=True
        )
        self._pieces.on_finalized_text = self._take
        self._show = show

    def put(self, value: Any) -> None:
        """Take the prompt, then each token."""
        self._pieces.put(value.reshape(-1))
        if self._prompt:
            self._prompt = False
            return
        self._times.append(time.perf_counter())
        self.tokens.extend(value.reshape(-1).tolist())

    def end(self) -> None:
        """Write what is left."""
        self._end = time.perf_counter()
        self._pieces.end()

    def _take(self, text: str, stream_end: bool = False) -> None:
        prompt, text = text[: self._of_prompt], text[self._of_prompt :]
        self._of_prompt -= len(prompt)
        text = prompt + self._until_stop.push(text)
        if stream_end:
            text += self._until_stop.rest()
        self.text += text
        if self._show:
            show(text)

    def prompt_speed(self, tokens: int) -> float | None:
        """Tokens of the prompt read in a second."""
        end = self._times[0] if self._times else self._end
        return None if end is None else tokens / (end - self._start)

    def speed(self) -> float | None:
        """Tokens written in a second, from the first to the last."""
        if len(self._times) < 2:
            return None
        return (len(self._times) - 1) / (self._times[-1] - self._times[0])


def _print_summary(summary: dict[str, Any], output: Output) -> None:
    cache = summary["cache"]
    rows = [
        ("prompt", tokens_and_speed(summary["prompt_tokens"], summary["prompt_tokens_per_second"])),
        ("generation", tokens_and_speed(summary["generated_tokens"], summary["tokens_per_second"])),
        (
            "cache",
            f"{cache['dtype']}, {cache['tokens']} tokens in {format_size(cache['used_bytes'])}",
        ),
        *([("from the store", f"{reused} tokens")] if (reused := summary["reused_tokens"]) else []),
        ("engine", summary["engine"]),
        ("threads", str(summary["num_threads"])),
    ]
    if summary["seed"] is not None:
        rows.insert(2, ("seed", str(summary["seed"])))
    output.facts("kvedge generate", rows, stream=sys.stderr)
