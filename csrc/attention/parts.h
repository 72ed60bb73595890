/* A call on several parts, as requests: made, given room for their results, run by the caller, merged. */
#ifndef KVEDGE_PARTS_H
#define KVEDGE_PARTS_H

#include "attention/internal.h"

#define KVEDGE_MOST_TOKENS ((int64_t)1 << 40)
enum { KVEDGE_MOST_PARTS = 4096 };

/* Requests that a part is at most: it, or the first tokens, body and last tokens of a layer. */
int kvedge_requests_of_part(const kvedge_part *part);
/* Segments that a part needs at most; 0: it is not valid. */
int64_t kvedge_segments_of_part(const kvedge_part *part);

/* What calls are planned in: room for all, moved past what was used. */
typedef struct {
  kvedge_segment *segments;
  kvedge_attention_options *options;
  kvedge_request *requests;
} kvedge_call_room;

/* Checks a call on parts, and makes requests of them, at least one; returns their number. Layers of three ranges are held. */
int kvedge_requests_of_parts(const kvedge_attention_call *call, kvedge_call_room *room, kvedge_status *status);

/* Room for turned queries, and for the results of the requests of a call but for one alone,
 * which writes to the call's own arrays; perhaps 0. */
size_t kvedge_parts_bytes(const kvedge_request *requests, int num_parts);

/* Room for the result of one of several requests. */
size_t kvedge_result_bytes(const kvedge_request *request);

/* Turns queries, and lets the requests of a call read and write them in `room`; returns its end. */
char *kvedge_parts_take_room(kvedge_request *requests, int num_parts, char *room);

/* The call's own results, of those of its requests. */
void kvedge_merge_parts(const kvedge_attention_call *call, const kvedge_request *requests, int num_parts);

#endif
