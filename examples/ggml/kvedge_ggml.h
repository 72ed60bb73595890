/* kvedge's attention as nodes of a ggml graph, in the place of ggml_set_rows (twice) and ggml_flash_attn_ext.
 *
 * docs/ggml.md tells how a fork of llama.cpp takes it in. Copy these two files; they need kvedge.h and ggml.h.
 */
#ifndef KVEDGE_GGML_H
#define KVEDGE_GGML_H

#include <ggml.h>
#include <kvedge.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The cache of one layer (and stream) in ggml's memory: `cells` rows, in each the heads of one token side by side.
 * As llama.cpp has them with flash attention, k and v are [head_dim * num_kv_heads, cells], F32, F16 or BF16, and ggml's
 * own nodes can read and write them as well. Of type I8 they hold kvedge's int8 codes, and k_scale and v_scale,
 * [num_kv_heads, cells] of F32, a scale per row; NULL otherwise. All of them are allocated, and cleared at first.
 * Returns a layer that keeps pointing there, or NULL: a shape or type that is none of these, or no memory.
 * Free with kvedge_ggml_detach; the tensors stay. */
kvedge_layer *kvedge_ggml_attach(const struct ggml_tensor *k, const struct ggml_tensor *v,
                                 const struct ggml_tensor *k_scale, const struct ggml_tensor *v_scale,
                                 int num_kv_heads);
void kvedge_ggml_detach(kvedge_layer *layer);

/* One attention of a graph: lives as long as the graph. Set to 0, then fill in the first part. */
typedef struct {
  kvedge_layer *layer;
  int64_t n_kv;       /* cells 0..n_kv-1 are looked at */
  float scale;        /* of the logits */
  float softcap;      /* 0: none */
  int precision_bits; /* as in kvedge_attention_options */

  kvedge_status status; /* when the graph has been computed; not KVEDGE_OK: the result is NaN */

  struct { /* of kvedge_ggml.c */
    struct ggml_tensor *out;
    kvedge_slices *slices;
    int next, done;
  } own;
} kvedge_ggml_call;

/* Builds the nodes; returns [head_dim, n_head, n_tokens], as ggml_flash_attn_ext does.
 *
 *   q       [head_dim, n_tokens, n_head] F32: as ggml_flash_attn_ext takes it, a permuted view
 *   k_cur   [head_dim, n_head_kv, n_tokens] F32, the new tokens' keys, already rotated (RoPE), and
 *   v_cur   values: stored before anything is read. NULL, both: they are in their cells already, by ggml_set_rows
 *   cells   [n_tokens] I64: the cell of each new token. NULL: no cell has changed
 *   mask    [n_kv, n_tokens or more] F16 or F32, added to the logits; -INFINITY hides. NULL: cells are in the order of
 *           their tokens, the queries are those of the last n_tokens, and see what is not after them
 *   sinks   [n_head] F32, or NULL
 *
 * Scratch memory is a tensor of the graph, which ggml's allocator gives out. All threads of ggml take part. */
struct ggml_tensor *kvedge_ggml_attend(struct ggml_context *ctx, kvedge_ggml_call *call, struct ggml_tensor *q,
                                       struct ggml_tensor *k_cur, struct ggml_tensor *v_cur, struct ggml_tensor *cells,
                                       struct ggml_tensor *mask, struct ggml_tensor *sinks);

#ifdef __cplusplus
}
#endif
#endif
