/* A sink of kvedge_session_write that fills memory; it refuses a piece that has no room. */
#ifndef KVEDGE_MEMORY_SINK_H
#define KVEDGE_MEMORY_SINK_H

#include <string.h>

typedef struct {
  char *at;
  size_t bytes, room;
} buffer;

static int take(void *context, const void *piece, size_t bytes) {
  buffer *to = context;
  if (bytes > to->room - to->bytes) return 1;
  memcpy(to->at + to->bytes, piece, bytes);
  to->bytes += bytes;
  return 0;
}

#endif
