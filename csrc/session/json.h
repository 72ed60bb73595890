/* The JSON that headers of safetensors files hold, read strictly and where it lies. What may come where is the caller's
 * to say, one call after the other, so that nothing here recurses or takes memory. */
#ifndef KVEDGE_JSON_H
#define KVEDGE_JSON_H

#include "system/arithmetic.h"

#include <stddef.h>
#include <stdint.h>

typedef struct {
  const char *at, *end; /* what is left to be read */
} kvedge_json;

/* Goes past white space. */
void kvedge_json_skip(kvedge_json *json);

/* Goes past white space and this character, if it is next. */
int kvedge_json_next(kvedge_json *json, char c);

/* Goes past a string, and writes its text as UTF-8 to out, which has `room` bytes; NULL:
 * nowhere. Returns the text's bytes; -1: there is no valid string, or its text is longer than
 * `room`. */
int64_t kvedge_json_string(kvedge_json *json, char *out, size_t room);

/* Goes past a whole number from 0 to 10^18 - 1. */
int kvedge_json_number(kvedge_json *json, int64_t *number);

/* Bytes of the UTF-8 character that n bytes of text, one or more, begin with; 0: it is none. */
int kvedge_utf8(const char *text, size_t n, uint32_t *code);

#endif
