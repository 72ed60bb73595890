/* Writing a session: its digest, its header, and the tensors as they lie in the layers. */
#include <string.h>

#include "session/contents.h"

static int can_be_written(const kvedge_contents *contents) {
  const kvedge_session *session = contents->session;
  if (!session || session->num_layers < 0 || session->num_layers > KVEDGE_MAX_LAYERS) return 0;
  if (session->num_layers > 0 && !contents->layers) return 0;
  for (int i = 0; i < session->num_layers; i++)
    if (!contents->layers[i]) return 0;
  if (kvedge_contents_fault(contents) || kvedge_states_fault(session)) return 0;
  for (int i = 0; i < session->num_layers; i++) {
    const kvedge_session_layer layer = kvedge_contents_layer(contents, i);
    int64_t start;
    if (kvedge_layer_range(contents->layers[i], &start) < kvedge_stored_tokens(session, &layer)) return 0;
    /* Runs begin at multiples of 32 rows, and of 32 positions. */
    if (kvedge_in_runs(&layer.config) && (start - layer.dropped) % KVEDGE_RUN) return 0;
  }
  return 1;
}

/* Calls `take` for each tensor in the order of the file: the widest elements first, so that all are aligned, then by
 * name. */
static void for_each_tensor(const kvedge_contents *contents, kvedge_output *out, kvedge_take_tensor *take) {
  for (int item_bytes = 4; item_bytes > 0; item_bytes /= 2) kvedge_each_tensor(contents, item_bytes, take, out);
}

typedef struct {
  kvedge_output out; /* the first member: for_each_tensor hands it over */
  uint64_t offset;   /* of the next tensor */
} header_output;

static void put_entry(kvedge_output *out, const kvedge_tensor *t, const char *folder, int number, const char *name) {
  uint64_t *offset = &((header_output *)out)->offset;
  kvedge_put_text(out, ",\"");
  kvedge_put_tensor_name(out, folder, number, name);
  kvedge_put_text(out, "\":{\"dtype\":\""), kvedge_put_text(out, t->type), kvedge_put_text(out, "\",\"shape\":");
  for (int d = 0; d < t->num_dims; d++) {
    kvedge_put_text(out, d ? "," : "[");
    kvedge_put_number(out, t->shape[d]);
  }
  kvedge_put_text(out, "],\"data_offsets\":["), kvedge_put_number(out, (int64_t)*offset);
  *offset += t->bytes;
  kvedge_put_text(out, ","), kvedge_put_number(out, (int64_t)*offset), kvedge_put_text(out, "]}");
}

/* The header as text, followed by spaces to a multiple of 8 bytes. */
static void put_header(header_output *header, const kvedge_contents *contents, const char *digest) {
  kvedge_output *out = &header->out;
  const uint64_t before = out->written;
  kvedge_put_text(out, "{\"__metadata__\":");
  kvedge_put_metadata(out, contents, digest);
  for_each_tensor(contents, out, put_entry);
  kvedge_put_text(out, "}");
  while ((out->written - before) % 8) kvedge_put_text(out, " ");
}

static void put_tensor(kvedge_output *out, const kvedge_tensor *t, const char *folder, int number, const char *name) {
  (void)folder, (void)number, (void)name;
  kvedge_put_data(out, t);
}

/* Bytes of the header; *tensors: of what follows it. */
static uint64_t header_bytes(const kvedge_contents *contents, uint64_t *tensors) {
  static const char some_digest[KVEDGE_DIGEST] = {0};
  header_output header = {.out = kvedge_output_to(NULL, NULL)};
  put_header(&header, contents, some_digest);
  *tensors = header.offset;
  return header.out.written;
}

size_t kvedge_session_bytes(const kvedge_session *session, kvedge_layer *const *layers) {
  const kvedge_contents contents = {.session = session, .layers = layers};
  uint64_t tensors;
  if (!can_be_written(&contents)) return 0;
  const uint64_t header = header_bytes(&contents, &tensors), bytes = 8 + header + tensors;
  return header > KVEDGE_MAX_HEADER || bytes > SIZE_MAX ? 0 : (size_t)bytes;
}

kvedge_status kvedge_session_write(const kvedge_session *session, kvedge_layer *const *layers, kvedge_session_sink sink,
                                   void *context) {
  const kvedge_contents contents = {.session = session, .layers = layers};
  uint64_t tensors;
  char digest[KVEDGE_DIGEST];
  if (!sink || !can_be_written(&contents)) return KVEDGE_ERROR_ARGUMENT;
  const uint64_t bytes = header_bytes(&contents, &tensors);
  if (bytes > KVEDGE_MAX_HEADER) return KVEDGE_ERROR_ARGUMENT;
  kvedge_contents_digest(&contents, digest);
  header_output header = {.out = kvedge_output_to(sink, context)};
  for (int i = 0; i < 8; i++) kvedge_put(&header.out, (const uint8_t[]){(uint8_t)(bytes >> 8 * i)}, 1);
  put_header(&header, &contents, digest);
  for_each_tensor(&contents, &header.out, put_tensor);
  kvedge_output_flush(&header.out);
  return header.out.failed ? KVEDGE_ERROR_FILE : KVEDGE_OK;
}
