/* Configs by name, as kvedge/core/recommended.py has them; docs/formats.md has the measurements. */
#include <string.h>

#include "kvedge.h"
#include "system/arithmetic.h"

static const struct {
  const char *name;
  kvedge_layer_config config;
} recommended[] = {
    {"auto",
     {.format = KVEDGE_KIVI8,
      .value_format = KVEDGE_VALUES(KVEDGE_INT8),
      .value_rotation = 1,
      .recent = 64,
      .sinks = 4}                                               },
    {"small", {.format = KVEDGE_KIVI4, .recent = 96, .sinks = 4}},
    {"int8",  {.format = KVEDGE_INT8}                           },
};

kvedge_status kvedge_layer_config_of(const char *name, kvedge_layer_config *config) {
  for (size_t i = 0; name && config && i < sizeof recommended / sizeof *recommended; i++)
    if (!strcmp(name, recommended[i].name)) {
      *config = recommended[i].config;
      return KVEDGE_OK;
    }
  return KVEDGE_ERROR_ARGUMENT;
}
