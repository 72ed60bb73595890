/* Text and bytes on their way to a sink, which gets many at a time. */
#include "session/output.h"

#include <string.h>

#include "session/json.h"

kvedge_output kvedge_output_to(kvedge_session_sink sink, void *context) {
  kvedge_output out;
  out.sink = sink, out.context = context, out.written = 0, out.failed = 0, out.buffered = 0;
  return out;
}

static void pass_on(kvedge_output *out, const void *bytes, size_t n) {
  if (n > 0 && out->sink && !out->failed) out->failed = out->sink(out->context, bytes, n) != 0;
}

void kvedge_output_flush(kvedge_output *out) {
  pass_on(out, out->buffer, out->buffered);
  out->buffered = 0;
}

void kvedge_put(kvedge_output *out, const void *bytes, size_t n) {
  out->written += n;
  if (n > sizeof out->buffer - out->buffered) kvedge_output_flush(out);
  if (n > sizeof out->buffer) {
    pass_on(out, bytes, n);
  } else if (n > 0) {
    memcpy(out->buffer + out->buffered, bytes, n);
    out->buffered += n;
  }
}

void kvedge_put_text(kvedge_output *out, const char *text) { kvedge_put(out, text, strlen(text)); }

void kvedge_put_number(kvedge_output *out, int64_t number) {
  char digits[20];
  size_t at = sizeof digits;
  do digits[--at] = (char)('0' + number % 10);
  while ((number /= 10) > 0);
  kvedge_put(out, digits + at, sizeof digits - at);
}

static void put_unit(kvedge_output *out, uint32_t unit) { /* of UTF-16 */
  char text[6] = "\\u";
  for (int i = 0; i < 4; i++) text[2 + i] = "0123456789abcdef"[unit >> (12 - 4 * i) & 15];
  kvedge_put(out, text, sizeof text);
}

void kvedge_put_escaped(kvedge_output *out, const char *text, size_t bytes, int ascii) {
  static const char characters[] = "\"\\\b\f\n\r\t", names[] = "\"\\bfnrt";
  for (size_t at = 0; at < bytes;) {
    uint32_t code;
    const int length = kvedge_utf8(text + at, bytes - at, &code);
    if (length == 0) break; /* callers have checked the text */
    const char *short_name = code > 0 && code < 0x80 ? strchr(characters, (int)code) : NULL;
    if (short_name) {
      kvedge_put(out, (char[]){'\\', names[short_name - characters]}, 2);
    } else if (code < 0x20 || (ascii && code >= 0x7f)) {
      if (code >= 0x10000) put_unit(out, 0xd7c0 + (code >> 10));
      put_unit(out, code < 0x10000 ? code : 0xdc00 + (code & 0x3ff));
    } else {
      kvedge_put(out, text + at, (size_t)length);
    }
    at += (size_t)length;
  }
}
