/* Which kernel table this process uses. (With the thread pool, all the state of the library that
 * belongs to no layer and no call.) */
#ifndef KVEDGE_DISPATCH_H
#define KVEDGE_DISPATCH_H

#include "kernels/kernels.h"
#include "kvedge.h"

/* The paths compiled into this library, best last; NULL past the end. */
const kvedge_kernels *kvedge_kernels_at(int index);

/* The path of that name if this CPU can run it; else NULL, with the reason in *why_not. */
const kvedge_kernels *kvedge_kernels_find(const char *name, const char **why_not);

/* Picks a path if none is picked yet; KVEDGE_ERROR_ISA where KVEDGE_ISA names what cannot be. */
kvedge_status kvedge_isa_ready(void);

/* The path in use. Only after kvedge_isa_ready() was once OK, as it is where a layer exists. */
const kvedge_kernels *kvedge_active(void);

#endif
