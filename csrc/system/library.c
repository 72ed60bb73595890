/* What the library says of itself: its version, a sentence about a status. */
#include "kvedge.h"
#include "system/arithmetic.h"

#define TEXT(number) #number
#define VERSION(major, minor, patch) TEXT(major) "." TEXT(minor) "." TEXT(patch)

const char *kvedge_version(void) { return VERSION(KVEDGE_VERSION_MAJOR, KVEDGE_VERSION_MINOR, KVEDGE_VERSION_PATCH); }

const char *kvedge_strerror(kvedge_status status) {
  switch (status) {
    case KVEDGE_OK: return "no error";
    case KVEDGE_ERROR_ARGUMENT: return "an argument is out of its range";
    case KVEDGE_ERROR_CAPACITY: return "the tokens do not fit into the layer's capacity";
    case KVEDGE_ERROR_NONFINITE: return "the input holds a NaN or an infinity";
    case KVEDGE_ERROR_SCALE: return "a row is too large for what it is stored in";
    case KVEDGE_ERROR_MEMORY: return "not enough memory";
    case KVEDGE_ERROR_ISA: return "KVEDGE_ISA names a path that this CPU cannot run";
    case KVEDGE_ERROR_FILE: return "a session file is damaged or none, or could not be written";
  }
  return "unknown status";
}
