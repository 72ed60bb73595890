/* Holds what every table does with single logits against a plain reference in double.
 *
 *   test_logits [all | NAME...]      NAME as in KVEDGE_ISA; default all
 *
 * Prints a line per kernel, then 'N passed, N failed'; exits with 1 if one failed.
 */
#include "tables.h"

static double bounded(double x) { return x > FLT_MAX ? FLT_MAX : x < -FLT_MAX ? -FLT_MAX : x; }

/* n numbers from -size to size, before a page without access */
static block new_numbers(int n, float size) {
  block b = new_rows(n, sizeof(float), sizeof(float));
  for (int t = 0; t < n; t++) ((float *)b.data)[t] = random_signed(size);
  return b;
}

/* 0 or 1, as many hidden as not; others than 0 and 1 show nothing else than 1 does. */
static block new_mask(int n) {
  block b = new_rows(n, 1, 1);
  for (int t = 0; t < n; t++) ((uint8_t *)b.data)[t] = (uint8_t)(random_below(2) ? 0 : 1 + random_below(255));
  return b;
}

static block new_bias(int n, float size) {
  block b = new_numbers(n, size);
  for (int t = 0; t < n; t++)
    if (random_below(4) == 0) ((float *)b.data)[t] = -INFINITY;
  return b;
}

#define FOR_LENGTHS(n, repeats)                                                                                        \
  for (int n = 1; n <= KVEDGE_TILE; n++)                                                                               \
    for (int repeat = 0; repeat < repeats; repeat++)

static void to_logits_case(int n, double factor, double bias, float size, float cap) {
  block b = new_numbers(n, size);
  float *row = b.data, before[KVEDGE_TILE];
  if (random_below(3) == 0) row[random_below(n)] = 0.0f;
  memcpy(before, row, (size_t)n * sizeof *row);
  kernels->logits->to_logits(row, n, factor, bias, cap);
  for (int t = 0; t < n; t++) {
    double product = before[t] * factor, logit = bounded(product + bias), allowed = 2e-7 * (fabs(product) + fabs(bias));
    if (cap > 0.0f) {
      allowed = fmin(allowed, 2.0 * cap) + 4e-7 * fmin(fabs(logit), cap);
      logit = cap * tanh(logit / cap);
    }
    if (!isfinite(row[t]) || !near(row[t], logit, allowed + 1e-37 + (cap > 1e37f ? 1e-6 : 0.0)))
      fail("%d of %d: %.9g * %g + %g, cap %g: %.9g, not %.9g", t, n, before[t], factor, bias, cap, row[t], logit);
    if (cap > 0.0f && fabsf(row[t]) > cap) fail("%.9g is above its cap, %.9g", row[t], cap);
  }
  end_case();
  free_block(&b);
}

static void test_to_logits(void) {
  static const double factors[] = {0.125, 1.0, 3.7e-5, 40.0, 1e-30, 1e30, 1e200, 1e-200};
  static const float sizes[] = {1.0f, 300.0f, 1e-20f, 1e20f, 3e38f};
  static const float caps[] = {0.0f, 0.5f, 5.0f, 50.0f, 1e6f, 1e-38f, 1e-40f, 3e38f};
  begin("%s to_logits", kernels->name);
  FOR_LENGTHS(n, 3)
  to_logits_case(n, factors[random_below(8)], random_below(2) ? 0.0 : random_signed(random_below(2) ? 10.0f : 1e30f),
                 sizes[random_below(5)], caps[random_below(8)]);
  for (int c = 1; c <= 4; c++) /* near where one formula takes over from the other, and where tanh is 1 */
    for (int i = 0; i < 40; i++)
      to_logits_case(KVEDGE_TILE, i < 20 ? 0.51 * caps[c] : 20.0 * caps[c], 0.0, 1.0f, caps[c]);
  end();
}

static void test_add_slope(void) {
  begin("%s add_slope", kernels->name);
  FOR_LENGTHS(n, 2) {
    const float sizes[] = {3.0f, 1e4f, 3e38f}, size = sizes[random_below(3)];
    float slope = random_below(4) ? random_signed(1.0f) : random_signed(3e38f), first = (float)-random_below(1 << 20);
    block b = new_numbers(n, size);
    float *logits = b.data, before[KVEDGE_TILE];
    memcpy(before, logits, (size_t)n * sizeof *logits);
    kernels->logits->add_slope(logits, n, slope, first);
    for (int t = 0; t < n; t++) {
      double added = (double)slope * (first + t); /* too large for a float: its sign decides */
      double sum = fabs(added) > FLT_MAX ? added : before[t] + added;
      if (!isfinite(logits[t]) || !near(logits[t], bounded(sum), 2e-7 * (fabs(before[t]) + fabs(bounded(added)))))
        fail("%d of %d: %.9g + %g * (%g + %d): %.9g", t, n, before[t], slope, first, t, logits[t]);
    }
    end_case();
    free_block(&b);
  }
  end();
}

static void test_hiding(void) {
  begin("%s add_bias, hide", kernels->name);
  FOR_LENGTHS(n, 3) {
    float size = random_below(4) ? 5.0f : 3e38f;
    block numbers = new_numbers(n, size), bias_block = new_bias(n, size), mask_block = new_mask(n);
    float *logits = numbers.data, before[KVEDGE_TILE];
    const float *bias = random_below(4) ? bias_block.data : NULL;
    const uint8_t *mask = random_below(4) ? mask_block.data : NULL;
    memcpy(before, logits, (size_t)n * sizeof *logits);
    kernels->logits->hide(logits, n, mask, bias, 0.0f);
    for (int t = 0; t < n; t++) {
      int hidden = (mask && !mask[t]) || (bias && bias[t] == -INFINITY);
      if (logits[t] != (hidden ? 0.0f : before[t])) fail("hide, %d of %d: %.9g", t, n, logits[t]);
    }
    memcpy(logits, before, (size_t)n * sizeof *logits);
    if (bias) kernels->logits->add_bias(logits, n, bias);
    kernels->logits->hide(logits, n, mask, NULL, -INFINITY);
    for (int t = 0; t < n; t++) {
      double sum = bias ? (double)before[t] + bias[t] : before[t];
      int hidden = (mask && !mask[t]) || (bias && bias[t] == -INFINITY);
      if (hidden ? logits[t] != -INFINITY : !isfinite(logits[t]) || !near(logits[t], bounded(sum), 1e-7 * fabs(sum)))
        fail("add_bias and hide, %d of %d: %.9g, not %.9g", t, n, logits[t], hidden ? -INFINITY : sum);
    }
    end_case();
    free_block(&numbers), free_block(&bias_block), free_block(&mask_block);
  }
  end();
}

static void test_table(void) {
  test_to_logits();
  test_add_slope();
  test_hiding();
}

int main(int argc, char **argv) { return test_tables(argc, argv, test_table); }
