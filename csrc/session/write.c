/* Writing a session: its digest, its header, and the tensors as they lie in the layers. */
#include "session/contents.h"
#include "store/layer.h"

static int can_be_written(const kvedge_contents *contents) {
  const kvedge_session *session = contents->session;
  if (!session || !contents->layers || session->num_layers < 1 || session->num_layers > KVEDGE_MAX_LAYERS) return 0;
  for (int i = 0; i < session->num_layers; i++)
    if (!contents->layers[i]) return 0;
  if (kvedge_contents_fault(contents)) return 0;
  for (int i = 0; i < session->num_layers; i++) {
    const kvedge_session_layer layer = kvedge_contents_layer(contents, i);
    if (kvedge_layer_len(contents->layers[i]) < kvedge_held_tokens(session, &layer)) return 0;
  }
  return 1;
}

/* Calls `take` for each tensor in the order of the file: the widest elements first, so that all are aligned, then by
 * name. */
static void for_each_tensor(const kvedge_contents *contents, kvedge_output *out,
                            void (*take)(kvedge_output *out, const kvedge_tensor *t, int index, int tensor)) {
  for (int item_bytes = 4; item_bytes > 0; item_bytes /= 2)
    for (int i = 0; i >= 0; i = kvedge_next_layer(i, contents->session->num_layers))
      for (int tensor = 0; tensor < NUM_TENSORS; tensor++) {
        const kvedge_tensor t = kvedge_contents_tensor(contents, i, tensor);
        if (t.data && t.item_bytes == item_bytes) take(out, &t, i, tensor);
      }
}

typedef struct {
  kvedge_output out; /* the first member: for_each_tensor hands it over */
  uint64_t offset;   /* of the next tensor */
} header_output;

static void put_entry(kvedge_output *out, const kvedge_tensor *t, int index, int tensor) {
  uint64_t *offset = &((header_output *)out)->offset;
  kvedge_put_text(out, ",\"");
  kvedge_put_tensor_name(out, index, tensor);
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

static void put_tensor(kvedge_output *out, const kvedge_tensor *t, int index, int tensor) {
  (void)index, (void)tensor;
  kvedge_put(out, t->data, (size_t)t->bytes);
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
