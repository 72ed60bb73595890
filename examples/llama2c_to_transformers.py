"""A llama2.c checkpoint as a folder that Hugging Face transformers loads.

    python examples/llama2c_to_transformers.py stories15M.bin tokenizer.bin stories15M/
    kvedge generate --hf stories15M --prompt "Once upon a time"

Without arguments it converts the small model that comes with kvedge, to stories260K/. Needs
pip install 'kvedge[transformers]'. Checkpoints of version 0 (llama2.c's run.c reads them).
"""

import struct
import sys

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kvedge.data import STORIES_MODEL, STORIES_TOKENIZER

BOS, EOS = 1, 2


def read_model(path):
    """The model of a checkpoint, float32."""
    with open(path, "rb") as file:
        sizes = struct.unpack("<7i", file.read(28))
        numbers = torch.from_numpy(np.fromfile(file, "<f4"))
    dim, hidden, num_layers, num_heads, num_kv_heads, vocab, context = sizes
    head_dim = dim // num_heads
    tied, vocab = vocab > 0, abs(vocab)

    def take(*shape):
        nonlocal numbers
        size = int(np.prod(shape))
        taken, numbers = numbers[:size].reshape(shape), numbers[size:]
        return taken

    def halves(weight, heads):
        """llama2.c rotates neighbouring channels; transformers the two halves of a head."""
        pairs = weight.reshape(heads, head_dim // 2, 2, dim)
        return pairs.transpose(1, 2).reshape(heads * head_dim, dim)

    embedding = take(vocab, dim)
    attention_norm = take(num_layers, dim)
    wq = take(num_layers, num_heads * head_dim, dim)
    wk = take(num_layers, num_kv_heads * head_dim, dim)
    wv = take(num_layers, num_kv_heads * head_dim, dim)
    wo = take(num_layers, dim, num_heads * head_dim)
    ffn_norm = take(num_layers, dim)
    w1 = take(num_layers, hidden, dim)
    w2 = take(num_layers, dim, hidden)
    w3 = take(num_layers, hidden, dim)
    final_norm = take(dim)
    take(2, context, head_dim // 2)  # tables of RoPE, which transformers makes itself
    weights = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": final_norm,
        "lm_head.weight": embedding if tied else take(vocab, dim),
    }
    for i in range(num_layers):
        layer = {
            "input_layernorm": attention_norm[i],
            "post_attention_layernorm": ffn_norm[i],
            "self_attn.q_proj": halves(wq[i], num_heads),
            "self_attn.k_proj": halves(wk[i], num_kv_heads),
            "self_attn.v_proj": wv[i],
            "self_attn.o_proj": wo[i],
            "mlp.gate_proj": w1[i],
            "mlp.down_proj": w2[i],
            "mlp.up_proj": w3[i],
        }
        weights |= {f"model.layers.{i}.{name}.weight": value for name, value in layer.items()}
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=dim,
        intermediate_size=hidden,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=context,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    model = LlamaForCausalLM(config)
    model.load_state_dict(weights)
    return model.eval()


def read_tokenizer(path, context):
    """The tokenizer of a tokenizer.bin: SentencePiece's BPE, where the best score merges first."""
    with open(path, "rb") as file:
        file.read(4)  # the longest token
        tokens = []
        while head := file.read(8):
            score, length = struct.unpack("<fi", head)
            tokens.append((file.read(length).decode(errors="replace").replace(" ", "▁"), score))
    tokens[:3] = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    ids = {}
    for number, (text, _) in enumerate(tokens):
        ids[text if text not in ids else f"<unused{number}>"] = number
    merges = []
    for text, score in tokens:
        for cut in range(1, len(text)):
            if text[:cut] in ids and text[cut:] in ids and not text.startswith("<0x"):
                merges.append((score, text[:cut], text[cut:]))
    merges.sort(key=lambda merge: -merge[0])
    model = models.BPE(
        vocab=ids,
        merges=[(left, right) for _, left, right in merges],
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    from tokenizers.processors import TemplateProcessing

    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="</s>",
        model_max_length=context,
    )


def convert(checkpoint, tokenizer, folder):
    """Write the folder."""
    model = read_model(checkpoint)
    model.save_pretrained(folder)
    read_tokenizer(tokenizer, model.config.max_position_embeddings).save_pretrained(folder)


if __name__ == "__main__":
    if len(sys.argv) not in (1, 4):
        raise SystemExit(__doc__)
    arguments = sys.argv[1:] or [str(STORIES_MODEL), str(STORIES_TOKENIZER), "stories260K"]
    convert(*arguments)
    print(f"{arguments[2]}: a LlamaForCausalLM and its tokenizer")
