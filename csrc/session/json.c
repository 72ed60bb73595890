/* Reading JSON: strings, whole numbers, and the characters between them. */
#include "session/json.h"

#include <string.h>

void kvedge_json_skip(kvedge_json *json) {
  while (json->at < json->end && memchr(" \t\n\r", *json->at, 4)) json->at++;
}

int kvedge_json_next(kvedge_json *json, char c) {
  kvedge_json_skip(json);
  if (json->at == json->end || *json->at != c) return 0;
  json->at++;
  return 1;
}

int kvedge_utf8(const char *text, size_t n, uint32_t *code) {
  static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000}; /* of characters of so many bytes */
  const uint8_t *s = (const uint8_t *)text;
  const int length = s[0] < 0x80 ? 1 : s[0] >> 5 == 0x6 ? 2 : s[0] >> 4 == 0xe ? 3 : s[0] >> 3 == 0x1e ? 4 : 0;
  if (length == 0 || n < (size_t)length) return 0;
  *code = length == 1 ? s[0] : s[0] & 0x7fu >> length;
  for (int i = 1; i < length; i++) {
    if (s[i] >> 6 != 2) return 0;
    *code = *code << 6 | (s[i] & 0x3fu);
  }
  return *code >= least[length] && *code <= 0x10ffff && *code >> 11 != 0x1b ? length : 0; /* 0x1b: surrogates */
}

static int to_utf8(uint32_t code, char out[4]) {
  if (code < 0x80) return out[0] = (char)code, 1;
  const int length = code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
  for (int i = length - 1; i > 0; i--, code >>= 6) out[i] = (char)(0x80 | (code & 0x3f));
  out[0] = (char)((0xf00u >> length & 0xff) | code);
  return length;
}

/* The four digits of \uXXXX. */
static int hex_digits(kvedge_json *json, uint32_t *code) {
  if (json->end - json->at < 4) return 0;
  *code = 0;
  for (int i = 0; i < 4; i++) {
    const char c = *json->at++;
    const char *digit = c ? strchr("0123456789abcdefABCDEF", c) : NULL;
    if (!digit) return 0;
    const int value = (int)(digit - "0123456789abcdefABCDEF");
    *code = *code << 4 | (uint32_t)(value < 16 ? value : value - 6);
  }
  return 1;
}

/* What follows a backslash. */
static int escaped(kvedge_json *json, uint32_t *code) {
  static const char names[] = "\"\\/bfnrt", meanings[] = "\"\\/\b\f\n\r\t";
  if (json->at == json->end) return 0;
  const char c = *json->at++;
  if (c != 'u') {
    const char *name = c ? strchr(names, c) : NULL;
    if (name) *code = (uint32_t)meanings[name - names];
    return name != NULL;
  }
  uint32_t low;
  if (!hex_digits(json, code)) return 0;
  if (*code >> 11 != 0x1b) return 1;
  /* A pair of surrogates stands for one character. */
  if (*code >> 10 != 0x36 || json->end - json->at < 2 || json->at[0] != '\\' || json->at[1] != 'u') return 0;
  json->at += 2;
  if (!hex_digits(json, &low) || low >> 10 != 0x37) return 0;
  *code = 0x10000 + ((*code & 0x3ff) << 10 | (low & 0x3ff));
  return 1;
}

int64_t kvedge_json_string(kvedge_json *json, char *out, size_t room) {
  int64_t bytes = 0;
  if (!kvedge_json_next(json, '"')) return -1;
  while (json->at < json->end) {
    uint32_t code;
    char utf8[4];
    if (*json->at == '"') return json->at++, bytes;
    if (*json->at == '\\') {
      json->at++;
      if (!escaped(json, &code)) return -1;
    } else {
      const int length = kvedge_utf8(json->at, (size_t)(json->end - json->at), &code);
      if (length == 0 || code < 0x20) return -1;
      json->at += length;
    }
    const int length = to_utf8(code, utf8);
    if (out) {
      if ((size_t)length > room - (size_t)bytes) return -1;
      memcpy(out + bytes, utf8, (size_t)length);
    }
    bytes += length;
  }
  return -1;
}

int kvedge_json_number(kvedge_json *json, int64_t *number) {
  kvedge_json_skip(json);
  const char *first = json->at;
  *number = 0;
  for (; json->at < json->end && *json->at >= '0' && *json->at <= '9'; json->at++) {
    if (json->at - first == 18) return 0;
    *number = 10 * *number + (*json->at - '0');
  }
  const ptrdiff_t digits = json->at - first;
  return digits > 0 && (digits == 1 || *first != '0');
}
