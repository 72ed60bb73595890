/* Calls whose rows read lists of tokens (kvedge_attention_options.tokens), as requests for each row. */
#ifndef KVEDGE_LISTS_H
#define KVEDGE_LISTS_H

#include "attention/internal.h"

static inline int kvedge_has_lists(const kvedge_attention_options *o) { return o && o->tokens; }

/* Runs the requests of such a call, one for each of its parts, which tell of all tokens. Lists are checked first. */
kvedge_status kvedge_run_lists(const kvedge_request *parts, int num_parts, int num_threads);

#endif
