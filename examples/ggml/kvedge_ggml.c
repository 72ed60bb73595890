/* Two nodes per attention. ggml runs a node on all of its threads and has them meet at a barrier after it; so the first node
 * stores the new tokens and plans, on thread 0, and in the second all threads take slices of the plan. A custom node is called
 * on every thread, whatever its n_tasks is. */
#include "kvedge_ggml.h"

#include <math.h>
#include <stdlib.h>

static const size_t ALIGNMENT = 64; /* of kvedge's memory; ggml's tensors have 32 */
enum { MOST_THREADS = 32 };         /* that run slices, each with 300 KiB of its own */

kvedge_layer *kvedge_ggml_attach(const struct ggml_tensor *k, const struct ggml_tensor *v,
                                 const struct ggml_tensor *k_scale, const struct ggml_tensor *v_scale,
                                 int num_kv_heads) {
  kvedge_format format;
  switch (k->type) {
    case GGML_TYPE_I8: format = KVEDGE_INT8; break;
    case GGML_TYPE_F16: format = KVEDGE_FLOAT16; break;
    case GGML_TYPE_BF16: format = KVEDGE_BFLOAT16; break;
    case GGML_TYPE_F32: format = KVEDGE_FLOAT32; break;
    default: return NULL;
  }
  if (k->type != v->type || k->ne[1] != v->ne[1] || k->ne[0] % num_kv_heads || v->ne[0] % num_kv_heads) return NULL;
  if (!ggml_is_contiguous(k) || !ggml_is_contiguous(v)) return NULL;
  const struct ggml_tensor *scales[] = {k_scale, v_scale};
  for (int i = 0; i < 2 && format == KVEDGE_INT8; i++)
    if (!scales[i] || scales[i]->type != GGML_TYPE_F32 || scales[i]->ne[0] != num_kv_heads ||
        scales[i]->ne[1] != k->ne[1] || !ggml_is_contiguous(scales[i]))
      return NULL;
  const kvedge_layer_config config = {.format = format,
                                      .capacity = k->ne[1],
                                      .num_kv_heads = num_kv_heads,
                                      .head_dim = (int)(k->ne[0] / num_kv_heads),
                                      .value_head_dim = (int)(v->ne[0] / num_kv_heads)};
  const kvedge_slabs slabs = {.key_codes = k->data,
                              .value_codes = v->data,
                              .key_scales = format == KVEDGE_INT8 ? k_scale->data : NULL,
                              .value_scales = format == KVEDGE_INT8 ? v_scale->data : NULL};
  const size_t bytes = kvedge_layer_header_bytes(&config);
  void *header = bytes ? malloc(bytes) : NULL;
  kvedge_layer *layer = NULL;
  if (header && kvedge_layer_init(header, bytes, &config, &slabs, &layer) != KVEDGE_OK) free(header);
  return layer;
}

void kvedge_ggml_detach(kvedge_layer *layer) {
  kvedge_quiesce();
  free(layer); /* the header, where the layer begins */
}

/* Stores token i of k and v, [head_dim, n_head_kv, n_tokens] each, to the cell that `where` names, or with NULL learns of the
 * row that lies there now; runs of cells at once. */
static kvedge_status store(kvedge_layer *layer, const struct ggml_tensor *k, const struct ggml_tensor *v,
                           const struct ggml_tensor *where) {
  const int64_t *cells = where->data;
  const int dense = !k || (ggml_is_contiguous(k) && ggml_is_contiguous(v));
  for (int64_t i = 0, n; i < where->ne[0]; i += n) {
    for (n = 1; dense && i + n < where->ne[0] && cells[i + n] == cells[i] + n;) n++;
    const kvedge_status status =
        k ? kvedge_layer_write(layer, cells[i], (const float *)((const char *)k->data + (size_t)i * k->nb[2]),
                               (const float *)((const char *)v->data + (size_t)i * v->nb[2]), n)
          : kvedge_layer_filled(layer, cells[i], n);
    if (status != KVEDGE_OK) return status;
  }
  return KVEDGE_OK;
}

/* The sources of both nodes. */
enum { QUERY, MASK, SINKS, PLAN, NEW_KEYS = PLAN, NEW_VALUES, CELLS };

/* What sizes depend on is the same before the graph is allocated, when mask->data and sinks->data are not there yet. */
static kvedge_attention_options options_of(const kvedge_ggml_call *call, const struct ggml_tensor *mask,
                                           const struct ggml_tensor *sinks) {
  static const float not_there_yet;
  kvedge_attention_options options;
  kvedge_attention_defaults(&options);
  options.scale = call->scale;
  options.softcap = call->softcap;
  options.precision_bits = call->precision_bits;
  options.num_tokens = call->n_kv;
  if (mask) {
    options.causal = 0; /* the mask says it */
    options.bias = mask->data ? mask->data : &not_there_yet;
    options.bias_strides[1] = (int64_t)(mask->nb[1] / sizeof(float));
    options.bias_strides[2] = 1;
  }
  if (sinks) options.sink_logits = sinks->data ? sinks->data : &not_there_yet;
  return options;
}

static kvedge_array heads_of(void *data, int num_heads, int dim) {
  const ptrdiff_t row = (ptrdiff_t)sizeof(float) * dim;
  return (kvedge_array){data, KVEDGE_TYPE_FLOAT32, row * num_heads, row};
}

/* What sizes depend on is known before the data. */
static kvedge_attention_call attention_of(const kvedge_ggml_call *call, const struct ggml_tensor *q, void *out,
                                          const kvedge_attention_options *options) {
  kvedge_layer_config config;
  kvedge_layer_describe(call->layer, &config, NULL);
  return (kvedge_attention_call){.layer = call->layer,
                                 .query = heads_of(q->data, (int)q->ne[1], config.head_dim),
                                 .num_rows = q->ne[2],
                                 .num_heads = (int)q->ne[1],
                                 .out = heads_of(out, (int)q->ne[1], config.value_head_dim),
                                 .options = options};
}

/* dst: the memory of the attention that the other node runs. */
static void store_and_plan(struct ggml_tensor *dst, int ith, int nth, void *userdata) {
  (void)nth;
  if (ith) return;
  kvedge_ggml_call *call = userdata;
  const struct ggml_tensor *q = dst->src[QUERY];
  call->own.next = call->own.done = 0;
  call->status = KVEDGE_OK;
  if (dst->src[CELLS]) call->status = store(call->layer, dst->src[NEW_KEYS], dst->src[NEW_VALUES], dst->src[CELLS]);
  /* Cells that nothing was stored in hold what was loaded into them, or zeros. */
  if (!call->status && kvedge_layer_len(call->layer) < call->n_kv)
    call->status = kvedge_layer_set_len(call->layer, call->n_kv);
  if (call->status) return;
  const kvedge_attention_options options = options_of(call, dst->src[MASK], dst->src[SINKS]);
  const uintptr_t start = ((uintptr_t)dst->data + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  const kvedge_attention_call one = attention_of(call, q, call->own.out->data, &options);
  call->status =
      kvedge_slices_init((void *)start, (size_t)dst->ne[0] - ALIGNMENT, &one, 1, MOST_THREADS, &call->own.slices);
}

static void run(struct ggml_tensor *dst, int ith, int nth, void *userdata) {
  kvedge_ggml_call *call = userdata;
  if (!call->status && ith < MOST_THREADS)
    for (int slice;
         (slice = __atomic_fetch_add(&call->own.next, 1, __ATOMIC_RELAXED)) < kvedge_slices_count(call->own.slices);)
      kvedge_slices_run(call->own.slices, slice, -1, ith);
  if (!call->status || __atomic_add_fetch(&call->own.done, 1, __ATOMIC_ACQ_REL) < nth) return;
  for (int64_t i = 0; i < ggml_nelements(dst); i++)
    ((float *)dst->data)[i] = NAN; /* the last thread of a call that failed */
}

struct ggml_tensor *kvedge_ggml_attend(struct ggml_context *ctx, kvedge_ggml_call *call, struct ggml_tensor *q,
                                       struct ggml_tensor *k_cur, struct ggml_tensor *v_cur, struct ggml_tensor *cells,
                                       struct ggml_tensor *mask, struct ggml_tensor *sinks) {
  q = ggml_permute(ctx, q, 0, 2, 1, 3); /* [head_dim, n_head, n_tokens]: mostly what it was before it was permuted */
  if (!ggml_is_contiguous(q)) q = ggml_cont(ctx, q);
  if (mask && mask->type != GGML_TYPE_F32) mask = ggml_cast(ctx, mask, GGML_TYPE_F32);

  kvedge_layer_config config;
  kvedge_layer_describe(call->layer, &config, NULL);
  GGML_ASSERT(q->type == GGML_TYPE_F32 && q->ne[0] == config.head_dim && q->ne[3] == 1);
  GGML_ASSERT(!mask || (mask->ne[0] == call->n_kv && mask->ne[1] >= q->ne[2] && mask->ne[2] == 1));
  GGML_ASSERT(!sinks || (sinks->type == GGML_TYPE_F32 && sinks->ne[0] == q->ne[1]));
  GGML_ASSERT(!cells || (cells->type == GGML_TYPE_I64 && ggml_is_contiguous(cells)));
  if (k_cur) {
    GGML_ASSERT(v_cur && cells);
    const struct ggml_tensor *new_rows[] = {k_cur, v_cur};
    for (int i = 0; i < 2; i++) {
      GGML_ASSERT(new_rows[i]->type == GGML_TYPE_F32 && new_rows[i]->ne[1] == config.num_kv_heads);
      GGML_ASSERT(new_rows[i]->ne[0] == (i ? config.value_head_dim : config.head_dim));
      GGML_ASSERT(new_rows[i]->ne[2] == cells->ne[0] && new_rows[i]->ne[3] == 1);
      GGML_ASSERT(new_rows[i]->nb[1] == (size_t)new_rows[i]->ne[0] * sizeof(float)); /* a token's heads side by side */
    }
  }

  const kvedge_attention_options options = options_of(call, mask, sinks);
  const kvedge_attention_call one = attention_of(call, q, NULL, &options);
  const size_t bytes = kvedge_slices_bytes(&one, 1, MOST_THREADS);
  GGML_ASSERT(bytes && "n_kv is at most the cells; n_head a multiple of n_head_kv; scale finite, softcap not negative");

  struct ggml_tensor *first[] = {q, mask, sinks, k_cur, v_cur, cells};
  struct ggml_tensor *plan =
      ggml_custom_4d(ctx, GGML_TYPE_I8, (int64_t)(bytes + ALIGNMENT), 1, 1, 1, first, 6, store_and_plan, 1, call);
  struct ggml_tensor *second[] = {q, mask, sinks, plan};
  call->own.out = ggml_custom_4d(ctx, GGML_TYPE_F32, config.value_head_dim, q->ne[1], q->ne[2], 1, second, 4, run,
                                 GGML_N_TASKS_MAX, call);
  return call->own.out;
}
