/* The end of a slice: its result is merged, and rows whose sums came out too small are attended to again.
 *
 * A row of one head may see much less than its call: others of its rows or heads, hidden tokens or stale ones may be
 * larger by many orders of magnitude. Then its sums come out so small that the smallest parts of them may be lost; that
 * is seen on the sums, and the row is attended to again with factors of what it sees itself. Tokens that are not seen so
 * have no part in the result, and ordinary calls pay nothing.
 */
#include <math.h>

#include "attention/tile.h"

/* What kernels may take for nothing is below 2^-96 of 1 for a token (WEIGHT_NOTHING times a code). Sums of a million
 * tokens above the first figure have lost less than 2^-36 of themselves, and logits of queries up to the second less
 * than 2^-46. */
#define LEAST_SUM 0x1p-40f
#define LARGEST_QUERY 0x1p80

static int may_have_lost(const kvedge_attention *a, const kvedge_queries *q, size_t state, float sum,
                         const float *acc) {
  if (!(sum > 0.0f)) return 0;
  if (q->logit_factor[state] > LARGEST_QUERY) return 1;
  const kvedge_view_side *values = &a->view.side[VALUES];
  if (values->bound == 0.0f) return 0;
  return kvedge_float_of_bits(a->kernels->abs_max_bits(acc, (size_t)values->shape.dim)) < LEAST_SUM;
}

/* The call for one row of one query head: its KV head is the only one of the view. */
static void plan_one(const kvedge_attention *a, int64_t row, int head, kvedge_attention *one) {
  kvedge_cache_view view = a->view;
  kvedge_attention_options options = a->options;
  const int kv_head = head / a->heads_per_kv_head;
  view.num_kv_heads = 1;
  for (int s = 0; s < SIDES; s++) {
    view.side[s].first_row += kv_head * view.side[s].head_stride;
    view.side[s].first_scale += kv_head * view.side[s].scale_head_stride;
  }
  const ptrdiff_t at = (ptrdiff_t)kv_head * view.side[KEYS].shape.dim;
  if (view.key_offset) view.key_offset += at;
  if (view.key_scale) view.key_scale += at;
  if (options.sink_logits) options.sink_logits += head;
  if (options.alibi_slopes) options.alibi_slopes += head;
  if (options.mask) options.mask += head * options.mask_strides[0] + row * options.mask_strides[1];
  if (options.bias) options.bias += head * options.bias_strides[0] + row * options.bias_strides[1];
  kvedge_attention_plan(one, &view, a->first_position + row, 1, 1, &options);
  one->is_refit = one->query_stays = 1;
}

/* The largest that the row of a planned call of one row sees. */
static float largest_seen(const kvedge_attention *one, int s) {
  const kvedge_row_block block = {.count = 1};
  const kvedge_visible visible = kvedge_visible_tokens(one, &block);
  float largest = 0.0f, of_token[KVEDGE_TILE];
  kvedge_row_cursor c = {.view = &one->view};
  for (int64_t token = 0, count; token < visible.stop; token += count) {
    count = visible.stop - token < KVEDGE_TILE ? visible.stop - token : KVEDGE_TILE;
    const mask_range seen = kvedge_mask_range(one, 0, token, (int)count);
    for (int t = 0; t < count; t++) {
      const int is_seen = t < seen.sinks || (t >= seen.first && t < seen.stop);
      of_token[t] = is_seen ? kvedge_bound_of_rows(&c, s, token + t, 0, 1) : 0.0f;
    }
    kvedge_clear_hidden(one, 0, 0, token, (int)count, of_token);
    for (int t = 0; t < count; t++) largest = fmaxf(largest, of_token[t]);
  }
  return largest;
}

static void refit(const kvedge_attention *a, int64_t row, int head, kvedge_workspace *w) {
  kvedge_attention planned, *one = (kvedge_attention *)a->refit;
  plan_one(a, row, head, &planned);
  *one = planned;
  for (int s = 0; s < SIDES; s++)
    one->factor[s] = kvedge_normalizing_factor(one->view.side[s].bound = largest_seen(one, s));
  if (one->factor[KEYS] == a->factor[KEYS] && one->factor[VALUES] == a->factor[VALUES]) return;
  kvedge_attention_lay_out(one, a->refit, 1);
  one->query = kvedge_array_from(&a->query, row, head);
  one->out = kvedge_array_from(&a->out, row, head);
  one->lse = a->lse ? a->lse + row * a->num_heads + head : NULL;
  one->log_sums = a->log_sums ? a->log_sums + row * a->num_heads + head : NULL;
  kvedge_prepare_queries(one);
  for (int slice = 0; slice < one->chunks_per_block; slice++) {
    kvedge_slice_run(one, slice, (kvedge_slice){.attention = NULL}, 0, w, NULL);
    kvedge_merge_slice(one, slice, 0);
  }
}

void kvedge_slice_collect(kvedge_attention *a, int slice, int slot, kvedge_workspace *w) {
  const kvedge_row_block block = kvedge_row_block_of(a, slice / a->chunks_per_block);
  const int group = a->heads_per_kv_head, key_heads = a->view.num_kv_heads;
  kvedge_merge_slice(a, slice, slot);
  kvedge_skip_count(a, slot);
  if (slice % a->chunks_per_block + 1 < a->chunks_per_block) return;
  const kvedge_queries q = kvedge_queries_of(a, block.index, slot);
  const kvedge_partial total = kvedge_partial_at(a, a->chunks_per_block > 1 ? a->num_slots : slot);
  for (int64_t r = 0; r < block.count; r++)
    for (int head = 0; head < key_heads * group; head++) {
      const size_t state = kvedge_query_index(a, head / group) + (size_t)(r * group + head % group);
      if (!may_have_lost(a, &q, state, total.sum[state], total.acc + state * (size_t)a->acc_stride)) continue;
      refit(a, block.first + r, head, w);
    }
}
