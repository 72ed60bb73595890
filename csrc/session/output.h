/* Text and bytes on their way to a sink, a digest or nowhere, where they are counted. */
#ifndef KVEDGE_OUTPUT_H
#define KVEDGE_OUTPUT_H

#include "kvedge.h"
#include "system/arithmetic.h"

typedef struct {
  kvedge_session_sink sink; /* NULL: nowhere */
  void *context;
  uint64_t written; /* bytes so far */
  int failed;       /* the sink has refused bytes, and gets no more */
  size_t buffered;  /* bytes that the sink has yet to get */
  char buffer[1024];
} kvedge_output;

kvedge_output kvedge_output_to(kvedge_session_sink sink, void *context);
void kvedge_output_flush(kvedge_output *out); /* at the end */

void kvedge_put(kvedge_output *out, const void *bytes, size_t n);
void kvedge_put_text(kvedge_output *out, const char *text);
void kvedge_put_number(kvedge_output *out, int64_t number);

/* UTF-8 text within a JSON string, as Python's json module writes it; `ascii`: other characters as \uXXXX. */
void kvedge_put_escaped(kvedge_output *out, const char *text, size_t bytes, int ascii);

#endif
