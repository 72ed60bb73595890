"""llama.cpp's own API, as far as the tests need it: a model, contexts of it, logits."""

import ctypes
import os
from contextlib import contextmanager
from pathlib import Path

import llama_cpp.llama_cpp as api
import numpy as np

ROOT = Path(__file__).parents[2]
#: A model of a size that people use.
SMOLLM = Path(os.environ.get("KVEDGE_GGUF", ROOT.parent / "models/SmolLM2-135M-Instruct.Q4_1.gguf"))


class Context:
    """One context, its tokens given as (token, position, sequences) and their logits taken."""

    def __init__(self, model, *, n_ctx=1536, threads=1, flash=True, sequences=1, **params):
        p = api.llama_context_default_params()
        p.n_ctx, p.n_batch, p.n_ubatch, p.n_seq_max = n_ctx, 512, 512, sequences
        p.n_threads = p.n_threads_batch = threads
        if any(name == "flash_attn_type" for name, _ in p._fields_):
            p.flash_attn_type = 1 if flash else 0
        else:  # until August 2025
            p.flash_attn = flash
        p.no_perf = True
        for name, value in params.items():
            setattr(p, name, value)
        self.pointer = api.llama_init_from_model(model.pointer, p)
        assert self.pointer
        self.num_words = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model.pointer))
        self.memory = api.llama_get_memory(self.pointer)

    def decode(self, tokens, start=0, sequence=0):
        """Logits after each of the tokens, a part of a batch at a time."""
        rows = []
        for first in range(0, len(tokens), 512):
            part = [
                (t, start + first + i, (sequence,))
                for i, t in enumerate(tokens[first : first + 512])
            ]
            rows.append(self.decode_batch(part))
        return np.concatenate(rows)

    def decode_batch(self, entries):
        batch = api.llama_batch_init(len(entries), 0, 8)
        try:
            batch.n_tokens = len(entries)
            for i, (token, position, sequences) in enumerate(entries):
                batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, len(sequences)
                for j, sequence in enumerate(sequences):
                    batch.seq_id[i][j] = sequence
                batch.logits[i] = 1
            assert api.llama_decode(self.pointer, batch) == 0
            logits = api.llama_get_logits(self.pointer)
            return np.ctypeslib.as_array(logits, (len(entries), self.num_words)).copy()
        finally:
            api.llama_batch_free(batch)

    def greedy(self, tokens, count, start=0, sequence=0):
        """Tokens of the largest logits, and the logits that each was chosen from."""
        logits = self.decode(tokens, start, sequence)[-1]
        chosen, all_logits = [], [logits]
        for i in range(count):
            chosen.append(int(all_logits[-1].argmax()))
            all_logits.append(self.decode([chosen[-1]], start + len(tokens) + i, sequence)[-1])
        return chosen, all_logits

    def state(self):
        size = api.llama_state_get_size(self.pointer)
        buffer = (ctypes.c_uint8 * size)()
        return bytes(buffer[: api.llama_state_get_data(self.pointer, buffer, size)])

    def load_state(self, data):
        buffer = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
        assert api.llama_state_set_data(self.pointer, buffer, len(data)) == len(data)

    def close(self):
        api.llama_free(self.pointer)


class Model:
    def __init__(self, path):
        api.llama_backend_init()
        quiet = api.llama_log_callback(lambda level, text, data: None)
        self._quiet = quiet
        api.llama_log_set(quiet, ctypes.c_void_p(0))
        p = api.llama_model_default_params()
        p.use_extra_bufts = (
            False  # ggml's AMX kernels fail on virtual machines that have no AMX state
        )
        self.pointer = api.llama_model_load_from_file(str(path).encode(), p)
        assert self.pointer, path

    def tokens(self, text):
        vocab = api.llama_model_get_vocab(self.pointer)
        data = text.encode()
        room = (api.llama_token * (len(data) + 8))()
        n = api.llama_tokenize(vocab, data, len(data), room, len(room), True, True)
        assert n > 0
        return list(room[:n])

    @contextmanager
    def context(self, **options):
        made = Context(self, **options)
        try:
            yield made
        finally:
            made.close()
