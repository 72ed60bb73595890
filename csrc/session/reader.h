/* A session file that is being read. */
#ifndef KVEDGE_READER_H
#define KVEDGE_READER_H

#include "session/contents.h"

struct kvedge_session_reader {
  kvedge_session session;
  kvedge_layer_tensors *tensors; /* [num_layers], where they lie in the file, at any address */
  char digest[KVEDGE_DIGEST];    /* as the file tells it */
};

#endif
