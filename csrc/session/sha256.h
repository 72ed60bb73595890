/* SHA-256 (FIPS 180-4). */
#ifndef KVEDGE_SHA256_H
#define KVEDGE_SHA256_H

#include "system/arithmetic.h"

#include <stddef.h>
#include <stdint.h>

typedef struct {
  uint32_t state[8];
  uint64_t bytes;    /* taken so far */
  uint8_t block[64]; /* the last bytes % 64 of them */
} kvedge_sha256;

void kvedge_sha256_begin(kvedge_sha256 *sha);
void kvedge_sha256_take(kvedge_sha256 *sha, const void *bytes, size_t n);
void kvedge_sha256_end(kvedge_sha256 *sha, char hex[64]); /* small letters, no NUL */

#endif
