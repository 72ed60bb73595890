"""The compiled backend: a layer's core over csrc/, and the public classes over it.

Every method goes the same way: arguments that are plainly right pass a few comparisons here, all
others go through kvedge.core.checks, which converts or refuses them in the words that both backends
share; then C does the work, without the GIL where that takes long.
"""

cimport cython
from kvedge cimport *
cimport numpy as cnp
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.float cimport FLT_MAX
from libc.math cimport NAN
from libc.stdint cimport UINTPTR_MAX, uintptr_t
from libc.string cimport memset

import os
from time import perf_counter

import numpy as np

cnp.import_array()

cdef dict _DEFAULTS = {}  # of the options of attend, by their names

# Below about this many numbers, giving the GIL away and taking it back costs more than the work.
cdef enum:
    _KEEP_GIL = 1 << 14
    _MAX_THREADS = 1024
    _RUN = 32
    _LEAST_TOKENS = 16  # kvedge.core.key_map.LEAST_TOKENS


# ---- the library --------------------------------------------------------------------------------

cdef extern from "system/measuring.h" nogil:
    double kvedge_read_bandwidth(int num_threads, size_t bytes, int repeats)
    double kvedge_product_rate(int num_threads, size_t products, int repeats)

cdef extern from *:
    """
    #if defined(_WIN32)
    static const char *library_file(void) { return NULL; } /* it is in the extension */
    #else
    #include <dlfcn.h>
    static const char *library_file(void) {
      Dl_info info;
      return dladdr((void *)kvedge_version, &info) ? info.dli_fname : NULL;
    }
    #endif
    #include "system/float_mode.h"
    static float nearest_float(double number) { /* whatever the mode of the process */
      volatile double exact = number;
      volatile float nearest;
      const uint32_t before = kvedge_take_default_mode();
      nearest = (float)exact;
      kvedge_give_back_mode(&before);
      return nearest;
    }
    """
    const char *library_file()
    float nearest_float(double number)


def built_from():
    """Versions of the header that this was compiled with and of the library; the library's file."""
    header = f"{KVEDGE_VERSION_MAJOR}.{KVEDGE_VERSION_MINOR}.{KVEDGE_VERSION_PATCH}"
    cdef const char *file = library_file()
    return header, kvedge_version().decode(), file.decode(errors="surrogateescape") if file else None


# ---- kernel paths, threads, bandwidth ------------------------------------------------------------


def select_isa(name=None):
    """Use the kernels of that name, or with None what KVEDGE_ISA names or else the best.

    Raises
    ------
    UnsupportedIsaError
        This CPU cannot run them; the kernels stay as they were.
    """
    cdef const char *why_not = NULL
    cdef bytes encoded = (name or "").encode()
    cdef const char *c_name = encoded
    if kvedge_select_isa(c_name if name else NULL, &why_not) != KVEDGE_OK:
        raise UnsupportedIsaError(
            f"KVEDGE_ISA={name or '(environment)'} cannot be used here: {why_not.decode()}; "
            f"this CPU runs {', '.join(isa_available())}"
        )


def isa_name():
    """Name of the kernels in use."""
    return kvedge_isa_name().decode()


def isa_compiled():
    """Names of the kernels in this build, slowest first."""
    names = []
    while kvedge_isa_compiled(len(names)) != NULL:
        names.append(kvedge_isa_compiled(len(names)).decode())
    return names


def isa_available():
    """Names of the kernels that this CPU can run, slowest first."""
    return [name for name in isa_compiled() if kvedge_isa_available(name.encode(), NULL)]


def read_bandwidth(int num_threads, int megabytes=512, int repeats=3):
    """Bytes per second that `num_threads` threads read from memory, best of `repeats` passes.

    Raises
    ------
    OutOfMemoryError
    """
    cdef double speed
    with nogil:
        speed = kvedge_read_bandwidth(num_threads, <size_t>megabytes << 20, repeats)
    if speed == 0.0:
        raise OutOfMemoryError(f"no {megabytes} MB to measure memory with {num_threads} threads")
    return speed


def product_rate(int num_threads, size_t products, int repeats=3):
    """Products per second of threads that make `products` each, in registers; best of `repeats` times.

    Raises
    ------
    OutOfMemoryError
    """
    cdef double rate
    with nogil:
        rate = kvedge_product_rate(num_threads, products, repeats)
    if rate == 0.0:
        raise OutOfMemoryError(f"no memory for {num_threads} threads to multiply with")
    return rate


cdef int _process = 1  # another number in a forked child, where no thread of its parent goes on


def _count_fork():
    global _process
    _process += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)


# ---- one layer -----------------------------------------------------------------------------------


cdef inline bint _is_plain(object array):
    """A float32 ndarray that can be read as it lies."""
    return (
        cnp.PyArray_CheckExact(array)
        and cnp.PyArray_TYPE(<cnp.ndarray>array) == cnp.NPY_FLOAT32
        and cnp.PyArray_ISCARRAY_RO(<cnp.ndarray>array)
    )


cdef inline float *_floats(object array):
    return <float *>cnp.PyArray_DATA(<cnp.ndarray>array)


cdef inline object _empty(int ndim, cnp.npy_intp *shape):
    return cnp.PyArray_EMPTY(ndim, shape, cnp.NPY_FLOAT32, 0)


include "native_threads.pxi"
include "native_arrays.pxi"


cdef class _Handle:
    """A kvedge_layer, what it points to and what that is: of one moment. Whoever is in a C call holds a reference, so
    a layer may take other slabs (to grow) while another thread still attends to the old ones."""

    cdef kvedge_layer *layer
    cdef void *header
    cdef object slabs, config, key_map
    cdef object body          # the slabs, or those of its runs
    cdef object apart         # slabs of first tokens, then of last ones; or None
    cdef int64_t first_room, last_room
    cdef int64_t dropped      # tokens dropped before row 0 of the body
    cdef uintptr_t low, high  # all of the body lies between these addresses
    cdef uintptr_t apart_low, apart_high

    cdef bint is_apart(self, uintptr_t start, uintptr_t stop):
        """Whether it surely shares no byte with these addresses."""
        return (start >= self.high or stop <= self.low) and (start >= self.apart_high or stop <= self.apart_low)

    cdef bint is_apart_from(self, cnp.ndarray array):
        cdef uintptr_t start = <uintptr_t>cnp.PyArray_DATA(array)
        return self.is_apart(start, start + cnp.PyArray_NBYTES(array))

    cdef list arrays(self):
        """All memory of its tokens."""
        return [*self.body, *(() if self.apart is None else self.apart[:2])]

    def __dealloc__(self):
        kvedge_quiesce()  # a late helper may still look at the slabs
        PyMem_Free(self.header)


cdef _bounds_of(arrays, uintptr_t *low, uintptr_t *high):
    cdef cnp.ndarray array
    cdef uintptr_t start
    low[0], high[0] = UINTPTR_MAX, 0
    for array in arrays:
        start = <uintptr_t>cnp.PyArray_DATA(array)
        low[0] = min(low[0], start)
        high[0] = max(high[0], start + cnp.PyArray_NBYTES(array))


cdef _Handle _attach(config, slabs, key_map, body=None, int64_t num_tokens=0, apart=None):
    """An empty C layer over slabs, and over those of runs; with room for last tokens when so many come at once."""
    cdef kvedge_layer_config c_config
    cdef kvedge_slabs c_slabs
    cdef size_t size
    memset(&c_config, 0, sizeof(c_config))
    memset(&c_slabs, 0, sizeof(c_slabs))
    cdef _Handle handle = _Handle()
    cdef bint in_runs = config.in_runs
    if body is None:
        body = memory.reserve_runs(config) if in_runs else slabs
    form = config.run if in_runs else config
    cdef int format_code = form.key_format.c_code
    cdef int scale_code = form.scale_type.c_code
    cdef int value_code = form.value_format.c_code
    cdef bint keys_scaled = form.key_format.has_scales
    cdef bint values_scaled = form.value_format.has_scales
    c_config.format = <kvedge_format>format_code
    c_config.scale_type = <kvedge_scale_type>scale_code
    c_config.capacity = config.capacity
    c_config.num_kv_heads = config.num_kv_heads
    c_config.head_dim = config.head_dim
    c_config.group_size = config.group_size
    c_config.value_head_dim = config.value_head_dim
    c_config.value_format = 1 + value_code  # KVEDGE_VALUES
    c_config.value_rotation = config.value_rotation
    c_slabs.key_codes = cnp.PyArray_DATA(body.key_codes)
    c_slabs.value_codes = cnp.PyArray_DATA(body.value_codes)
    c_slabs.key_scales = cnp.PyArray_DATA(body.key_scales) if keys_scaled else NULL
    c_slabs.value_scales = cnp.PyArray_DATA(body.value_scales) if values_scaled else NULL
    if key_map.offset is not None:
        key_map = key_map._replace(offset=np.ascontiguousarray(key_map.offset, np.float32))
    if key_map.scale is not None:
        key_map = key_map._replace(scale=np.ascontiguousarray(key_map.scale, np.float32))
    handle.slabs, handle.config, handle.key_map, handle.body = slabs, config, key_map, body
    handle.dropped = 0
    _bounds_of(body, &handle.low, &handle.high)
    cdef int of_parts
    if config.recent_dtype:
        of_parts = config.part_config.key_format.c_code
        c_config.recent, c_config.sinks, c_config.recent_format = config.recent, config.sinks, 1 + of_parts
        c_config.recent_room = max(num_tokens, 1) if config.recent else 0
        handle.first_room = config.sinks
        handle.last_room = kvedge_layer_last_rows(&c_config)
        handle.apart = apart or memory.reserve_slabs(config.apart(handle.first_room + handle.last_room))
        keys, values = handle.apart.key_codes, handle.apart.value_codes
        c_slabs.first_keys, c_slabs.first_values = cnp.PyArray_DATA(keys), cnp.PyArray_DATA(values)
        last_keys, last_values = keys[handle.first_room :], values[handle.first_room :]
        c_slabs.last_keys, c_slabs.last_values = cnp.PyArray_DATA(last_keys), cnp.PyArray_DATA(last_values)
        _bounds_of((keys, values), &handle.apart_low, &handle.apart_high)
    size = kvedge_layer_header_bytes(&c_config)
    handle.header = PyMem_Malloc(size)
    if handle.header == NULL:
        raise OutOfMemoryError(f"cannot allocate {size} bytes for a layer")
    status = kvedge_layer_init(handle.header, size, &c_config, &c_slabs, &handle.layer)
    if status == KVEDGE_OK and key_map.offset is not None:
        status = kvedge_layer_set_key_offset(handle.layer, _floats(key_map.offset))
    if status == KVEDGE_OK and key_map.scale is not None:
        status = kvedge_layer_set_key_scale(handle.layer, _floats(key_map.scale))
    if status != KVEDGE_OK:
        raise KvedgeError(kvedge_strerror(status).decode())
    return handle


cdef _Handle _adopted(_Handle old, _Handle handle, int64_t row):
    """`handle` with the tokens of another, whose row `row` is its row 0; that one may be appended to meanwhile."""
    cdef kvedge_status status
    with nogil:
        status = kvedge_layer_adopt(handle.layer, old.layer, row)
    if status != KVEDGE_OK:
        raise KvedgeError(kvedge_strerror(status).decode())
    handle.dropped = old.dropped + row
    return handle


cdef _Handle _again(_Handle old, int64_t num_tokens):
    """Another header over the same slabs, with first and last tokens of its own."""
    return _adopted(old, _attach(old.config, old.slabs, old.key_map, old.body, num_tokens), 0)


@cython.auto_pickle(False)
cdef class LayerStore:
    """Storage, quantizer and attention of one layer: a kvedge.layer.store.LayerStore."""

    cdef _Handle _handle                # read through _opened, replaced by _take
    cdef public bint frozen             # belongs to a KVCache, which alone may change it
    cdef public bint key_map_is_auto    # first tokens may decide it
    cdef public object key_rule         # KeyRule: what of the key map the first tokens decide
    cdef int _writing                   # _process, while a thread of it is appending: _begin_writing
    cdef cnp.npy_intp _num_kv_heads, _head_dim, _value_head_dim
    cdef cnp.npy_intp _widest  # of the last two
    cdef int64_t _limit                 # most tokens it holds
    cdef object _window                 # its config's: an int or None
    cdef int64_t _kept                  # what kept_rows says of its config
    cdef bint _has_recent, _in_runs
    cdef public object turns            # kvedge.rope.Turns or None
    cdef public int64_t evicted_at      # position of the last eviction; 0: none

    def open(self, config, slabs=None):
        self._take(None)
        self.turns = None
        self.frozen = self.key_map_is_auto = False
        self.evicted_at = 0
        self.key_rule = KeyRule()
        self._num_kv_heads = config.num_kv_heads
        self._head_dim = config.head_dim
        self._value_head_dim = config.value_head_dim
        self._widest = config.widest
        self._limit = checks.MAX_CAPACITY if config.limit is None else config.limit
        self._window = config.window
        self._has_recent, self._in_runs = config.recent > 0, config.in_runs
        self._kept = kept_rows(config)
        self.bind(memory.reserve_slabs(config) if slabs is None else slabs, config, NO_MAP)

    # A critical section orders threads of an interpreter without a GIL, and is nothing where there is one.

    cdef _Handle _opened(self):
        """The handle, to be held while C works with its layer."""
        cdef _Handle handle
        with cython.critical_section(self):
            handle = self._handle
        if handle is None:
            raise KvedgeError("this store was never opened")
        return handle

    cdef _take(self, _Handle handle):
        cdef _Handle old  # freed, which may wait for late helpers, after the section
        with cython.critical_section(self):
            old, self._handle = self._handle, handle

    cdef bint _begin_writing(self):
        """Whether no other thread is appending; then this one is, until _end_writing."""
        cdef int other
        with cython.critical_section(self):
            other = self._writing
            self._writing = _process
        if other and other != _process:  # a thread of the parent's, at the fork
            self.set_len(self.view().num_tokens)  # without what it had not come to the end of
        return other != _process

    cdef void _end_writing(self) noexcept:
        with cython.critical_section(self):
            self._writing = 0

    @property
    def config(self):
        return self._opened().config

    @property
    def slabs(self):
        return self._opened().slabs

    @property
    def key_map(self):
        return self._opened().key_map

    def arrays(self):
        return self._opened().arrays()

    def __len__(self):
        """Tokens stored."""
        return kvedge_layer_len(self._opened().layer)

    def view(self):
        cdef _Handle handle = self._opened()
        cdef int64_t start, length = kvedge_layer_range(handle.layer, &start)
        return memory.LayerView(handle.slabs, start, length, handle.dropped + start, handle, handle.key_map)

    def snapshot(self, end=None):
        cdef _Handle handle = self._opened()
        cdef kvedge_ranges r
        cdef int64_t start
        if handle.apart is None:
            return self.view()
        handle = _again(handle, handle.last_room - self._kept)
        kvedge_layer_range(handle.layer, &start)
        if end is not None:
            kvedge_layer_set_len(handle.layer, max(0, <int64_t>end - handle.dropped - start))
        kvedge_layer_get_ranges(handle.layer, &r)
        keys, values, key_scales, value_scales = handle.apart
        first = memory.Slabs(keys[: r.num_first], values[: r.num_first], key_scales[: r.num_first], value_scales[: r.num_first])
        rows = slice(handle.first_room + r.last_from - r.last_row, handle.first_room + r.stop - r.last_row)
        last = memory.Slabs(*[array[rows] for array in handle.apart])
        parts = Parts(
            first, handle.dropped + r.first_row, last, handle.dropped + r.last_from,
            handle.body if self._in_runs else None, handle.dropped)
        return memory.LayerView(
            handle.slabs, r.start, r.stop - r.start, handle.dropped + r.start, handle, handle.key_map, parts)

    def end(self):
        cdef _Handle handle = self._opened()
        cdef int64_t start, length = kvedge_layer_range(handle.layer, &start)
        return handle.dropped + start + length

    cdef bint key_map_is_open(self) except -1:
        """Whether the next tokens may decide it."""
        cdef _Handle handle
        cdef int64_t start, end
        if not self.key_map_is_auto:
            return False
        handle = self._opened()
        end = kvedge_layer_range(handle.layer, &start)
        end += handle.dropped + start
        return end < _LEAST_TOKENS and self.key_rule.is_open(handle.key_map, end)

    def written(self):
        return kvedge_layer_written(self._opened().layer)

    def bind(self, slabs, config, key_map=None):
        cdef _Handle old = self._handle
        cdef _Handle handle
        cdef int64_t start, row, length
        body = apart = None
        if key_map is None:
            key_map = old.key_map
        if old is None:
            self._take(_attach(config, slabs, key_map))
            return
        length = kvedge_layer_range(old.layer, &start)
        row = start
        if length == 0 and slabs is old.slabs:  # nobody reads them
            apart = old.apart
        if self._in_runs:
            row = start // _RUN * _RUN
            if slabs is old.slabs:
                body, row = old.body, 0
        handle = _attach(config, slabs, key_map, body, 0 if old.apart is None else old.last_room - self._kept, apart)
        if self._in_runs and body is None:
            memory.copy_runs(old.body, config, row, row + max(0, kvedge_layer_written(old.layer) + start - row), handle.body)
        self._take(_adopted(old, handle, row))

    def binding(self):
        cdef _Handle handle = self._opened()
        if handle.apart is not None:
            handle = _again(handle, handle.last_room - self._kept)
        return handle, kvedge_layer_len(handle.layer)

    def rebind(self, binding):
        cdef _Handle handle = binding[0]
        if handle.apart is None:
            kvedge_layer_set_len(handle.layer, binding[1])
        self._take(handle)

    def filled(self, int64_t position, int64_t num_tokens):
        """Rows were copied to the slabs, within capacity."""
        cdef _Handle handle = self._opened()
        if kvedge_layer_filled(handle.layer, position, num_tokens) != KVEDGE_OK:
            raise KvedgeError(f"tokens {position} to {position + num_tokens} are not in the layer")

    def set_len(self, int64_t n):
        kvedge_layer_set_len(self._opened().layer, n)

    def drop(self, int64_t n):
        kvedge_layer_drop_first(self._opened().layer, n)

    def holding(self, num_tokens, num_dropped, parts=None, start=0, key_map=None):
        cdef _Handle old = self._opened(), handle = None
        cdef int64_t first_row = start
        key_map = old.key_map if key_map is None else key_map
        if old.apart is None and key_map is not old.key_map:
            handle = _attach(old.config, old.slabs, key_map)
        if old.apart is not None:
            if parts is None:
                parts = empty_parts(old.config, num_dropped)
            parts = parts.since(num_dropped + num_tokens - self._kept)
            config, slabs, body = old.config, old.slabs, old.body
            if self._in_runs:
                first_row = <int64_t>num_dropped - <int64_t>parts.runs_at
                body = body if parts.runs is body else None
                if first_row + <int64_t>num_tokens > config.capacity:  # it begins within a run
                    config = replace(config, capacity=first_row + num_tokens)
                    slabs, body = memory.reserve_slabs(config), None
            handle = _attach(config, slabs, key_map, body)
            if self._in_runs and body is None:
                memory.copy_runs(parts.runs, config, 0, memory.tokens_of_runs(parts.runs, config), handle.body)
            handle.dropped = <int64_t>num_dropped - first_row
            count = len(parts.first.key_codes)
            for slab, rows in zip(handle.apart[:2], parts.first[:2]):
                slab[:count] = rows
            count = len(parts.last.key_codes)
            for slab, rows in zip(handle.apart[:2], parts.last[:2]):
                slab[handle.first_room : handle.first_room + count] = rows
        return partial(self._hold, handle, num_tokens, num_dropped, parts, first_row)

    def _hold(self, _Handle handle, int64_t num_tokens, int64_t num_dropped, parts, int64_t first_row):
        cdef kvedge_ranges r
        cdef _Handle old = self._opened()
        cdef int64_t stop
        if parts is None:
            handle = old if handle is None else handle
            kvedge_layer_set_len(handle.layer, 0)  # it looks anew at the rows that it gets
            if first_row == 0:  # else rows stay where they are
                kvedge_layer_compact(handle.layer)
            kvedge_layer_set_len(handle.layer, num_tokens)
            handle.dropped = num_dropped - first_row
            self._take(handle)
            return
        stop = first_row + num_tokens
        r.start, r.stop = first_row, stop
        r.last_from = r.last_row = min(stop, <int64_t>parts.last_at - handle.dropped)
        r.first_row = max(0, <int64_t>parts.first_at - handle.dropped)
        r.num_first = len(parts.first.key_codes)
        r.first_stop = <int64_t>handle.config.sinks - handle.dropped
        if kvedge_layer_set_ranges(handle.layer, &r) != KVEDGE_OK:
            raise KvedgeError(f"a layer cannot hold {num_tokens} tokens from row {first_row} on")
        self._take(handle)

    def restart(self, num_dropped=0):
        self.holding(0, num_dropped)()
        self.evicted_at = 0
        self.turns = None

    def set_key_map(self, key_map):
        # A C layer takes it only while it is empty: so this makes another over the same slabs.
        self.bind(self.slabs, self.config, key_map)

    # ---- removing and moving ---------------------------------------------------------------------

    def keeping(self, indices):
        cdef _Handle handle = self._opened(), plain = handle
        cdef int64_t start, length = kvedge_layer_range(handle.layer, &start)
        if handle.apart is not None:  # its rows alone; the caller has `holding` for the rest
            plain = _attach(handle.config.plain, handle.slabs, handle.key_map)
            kvedge_layer_set_len(plain.layer, start + length)
            kvedge_layer_drop_first(plain.layer, start)
        return partial(self._keep, plain, np.ascontiguousarray(indices, np.int64))

    def _keep(self, _Handle handle, cnp.ndarray tokens):
        cdef const int64_t *positions = <const int64_t *>cnp.PyArray_DATA(tokens)
        cdef int64_t num_tokens = tokens.shape[0]
        cdef kvedge_status status
        with nogil:
            status = kvedge_layer_keep(handle.layer, positions, num_tokens)
        if status != KVEDGE_OK:
            raise KvedgeError(kvedge_strerror(status).decode())

    # ---- tokens in -------------------------------------------------------------------------------

    cdef inline bint _is_token(self, object array, cnp.npy_intp width):
        cdef cnp.ndarray rows
        if not _is_plain(array):
            return False
        rows = <cnp.ndarray>array
        if rows.ndim == 2:
            return rows.shape[0] == self._num_kv_heads and rows.shape[1] == width
        return rows.ndim == 1 and rows.shape[0] == self._num_kv_heads * width

    cdef inline bint _is_tokens(self, object array, cnp.npy_intp width):
        cdef cnp.ndarray rows
        if not _is_plain(array):
            return False
        rows = <cnp.ndarray>array
        return (
            rows.ndim == 3
            and rows.shape[1] == self._num_kv_heads
            and rows.shape[2] == width
        )

    def push(self, keys, values):
        self._push(keys, values)

    @cython.final
    cdef object _push(self, keys, values):
        if self.frozen:
            checks.check_unfrozen(True)
        if self._is_token(keys, self._head_dim) and self._is_token(values, self._value_head_dim):
            self._store(keys, values, 1)
        else:
            self._store_any(keys, values, False, _NHD)
        if self._window is not None:
            room.slide(self, 1)

    def extend(self, keys, values, *, layout="nhd"):
        if self.frozen:
            checks.check_unfrozen(True)
        cdef int64_t before = len(self)
        self._extend(keys, values, True, layout)
        if self._window is not None:
            room.slide(self, len(self) - before)

    def append(self, keys, values, layout="nhd"):
        if self._is_token(keys, self._head_dim) and self._is_token(values, self._value_head_dim):
            _is_hnd(layout)
            self._store(keys, values, 1)
        else:
            self._extend(keys, values, None, layout)

    cdef _extend(self, keys, values, many, layout):
        if (
            layout is _NHD
            and self._is_tokens(keys, self._head_dim)
            and self._is_tokens(values, self._value_head_dim)
            and (<cnp.ndarray>keys).shape[0] == (<cnp.ndarray>values).shape[0]
        ):
            self._store(keys, values, (<cnp.ndarray>keys).shape[0])
        else:
            self._store_any(keys, values, many, layout)

    cdef _store(self, keys, values, int64_t num_tokens):
        """Append plain arrays of tokens."""
        cdef _Handle handle
        cdef bint stored = False
        with cython.critical_section(self):
            handle = self._handle
            if (
                handle is not None and self.turns is None and self._has_room(handle, num_tokens)
                and self._writing != _process and num_tokens * self._num_kv_heads * self._widest < _KEEP_GIL
                and num_tokens <= self._limit - kvedge_layer_len(handle.layer)
                and not self.key_map_is_open()
            ):
                stored = kvedge_layer_append(
                    handle.layer, _floats(keys), _floats(values), num_tokens) == KVEDGE_OK
        if stored:
            return
        # Large, the first ones, or refused: then nothing has changed, and it is refused again below.
        cdef kvedge_array key_rows = self._dense(keys, self._head_dim)
        cdef kvedge_array value_rows = self._dense(values, self._value_head_dim)
        self._store_rows(keys, values, &key_rows, &value_rows, num_tokens, None, _NHD)

    cdef inline kvedge_array _dense(self, object array, cnp.npy_intp width):
        cdef kvedge_array rows
        rows.data = cnp.PyArray_DATA(<cnp.ndarray>array)
        rows.type = KVEDGE_TYPE_FLOAT32
        rows.head_stride = width * sizeof(float)
        rows.token_stride = self._num_kv_heads * rows.head_stride
        return rows

    cdef _store_any(self, keys, values, many, layout):
        """Append arrays of any strides and types."""
        cdef bint hnd = _is_hnd(layout)
        cdef _Array key_rows, value_rows
        cdef kvedge_array c_keys, c_values
        if not (
            self._read_tokens(keys, self._head_dim, &key_rows, many, hnd)
            and self._read_tokens(values, self._value_head_dim, &value_rows, many, hnd)
            and key_rows.shape[1] == value_rows.shape[1]
        ):
            keys, values = checks.checked_rows(
                keys, values, self.config, len(self), many=many, layout=layout)
            many, layout = True, _NHD
            _read_ndarray(<cnp.ndarray>keys, &key_rows)
            _read_ndarray(<cnp.ndarray>values, &value_rows)
            _insert_axis(&key_rows, 0)
            _insert_axis(&value_rows, 0)
        c_keys, c_values = _rows_of(&key_rows, 0), _rows_of(&value_rows, 0)
        self._store_rows(keys, values, &c_keys, &c_values, key_rows.shape[1], many, layout)

    cdef bint _read_tokens(
        self, object array, Py_ssize_t width, _Array *to, many, bint hnd
    ) except -1:
        """Whether `array` can be read as it lies, as (1, n, num_kv_heads, width)."""
        if not _read(array, to):
            return False
        if to.ndim == 1 and many is not True and to.shape[0] == self._num_kv_heads * width:
            to.ndim = 2
            to.shape[0], to.shape[1] = self._num_kv_heads, width
            to.strides[0], to.strides[1] = width * to.itemsize, to.itemsize
        if not (to.ndim == 2 and many is not True or to.ndim == 3 and many is not False):
            return False
        _as_batch(to, True, to.ndim == 2, hnd)
        return to.shape[2] == self._num_kv_heads and to.shape[3] == width

    cdef _store_rows(
        self, keys, values, const kvedge_array *key_rows, const kvedge_array *value_rows,
        int64_t num_tokens, many, layout
    ):
        """Append rows; `keys` and `values` are what came, for what is said of rows that are refused."""
        if not self._begin_writing():
            raise KvedgeError("another thread is appending to this layer: one at a time may")
        try:
            self._store_alone(keys, values, key_rows, value_rows, num_tokens, many, layout)
        finally:
            self._end_writing()

    cdef _store_alone(
        self, keys, values, const kvedge_array *key_rows, const kvedge_array *value_rows,
        int64_t num_tokens, many, layout
    ):
        cdef kvedge_status status
        cdef _Handle handle
        cdef bint decides = num_tokens > 0 and self.key_map_is_open()
        cdef _Array turned
        cdef kvedge_array turned_rows
        turns = self.turns
        saved = layer_keys.savepoint(self) if decides else None
        try:
            if turns is not None and num_tokens > 0:
                keys, values = self._checked(keys, values, many, layout)
                keys = turned_back_next(self, keys)
                many, layout = True, _NHD
                _read_ndarray(<cnp.ndarray>keys, &turned)
                _insert_axis(&turned, 0)
                turned_rows = _rows_of(&turned, 0)
                key_rows = &turned_rows
            if decides:
                rows, _ = self._checked(keys, values, many, layout)
                layer_keys.decide(self, rows)
            status = self._append_rows(key_rows, value_rows, num_tokens)
            if status == KVEDGE_ERROR_CAPACITY:
                handle = self._opened()
                room.reserve(self, num_tokens)
                status = self._append_rows(key_rows, value_rows, num_tokens)
                if status != KVEDGE_OK:
                    self._take(handle)
            if status == KVEDGE_OK:
                return
            rows, value_tokens = self._checked(keys, values, many, layout)
            self._refuse_range(rows, value_tokens)
            raise KvedgeError(kvedge_strerror(status).decode())
        except BaseException:
            self.turns = turns
            if decides:
                layer_keys.roll_back(self, saved)
            raise

    @staticmethod
    def append_step(stores, keys, values):
        cdef list store_list = list(stores)
        cdef _Array key_rows, value_rows
        cdef LayerStore layer
        cdef Py_ssize_t begun = 0
        if not (
            _read(keys, &key_rows) and _fits_batch(&key_rows, store_list, False, _KEYS) and key_rows.ndim == 3
            and _read(values, &value_rows) and _fits_batch(&value_rows, store_list, False, _VALUES) and value_rows.ndim == 3
        ):
            return False
        for store in store_list:
            layer = <LayerStore>store
            if layer.turns is not None or layer.key_map_is_open():
                return False
        _as_batch(&key_rows, False, True, False)
        _as_batch(&value_rows, False, True, False)
        try:
            begun = _begin_writing_to(store_list)
            return begun == len(store_list) and _append_to_all(store_list, &key_rows, &value_rows) == KVEDGE_OK
        finally:
            _end_writing_to(store_list, begun)

    cdef inline bint _has_room(self, _Handle handle, int64_t num_tokens):
        """Whether the last tokens have the room for so many at once, and no more than they need."""
        cdef int64_t room = 2 * _RUN
        if handle.last_room == 0 or not self._has_recent:
            return True
        if num_tokens > room:
            room = num_tokens
        return handle.last_room == (self._kept + room + _RUN - 1) // _RUN * _RUN

    cdef kvedge_status _append_rows(
        self, const kvedge_array *keys, const kvedge_array *values, int64_t num_tokens
    ) except *:
        cdef _Handle handle = self._opened()
        cdef kvedge_status status
        if num_tokens > self._limit - kvedge_layer_len(handle.layer):
            return KVEDGE_ERROR_CAPACITY
        if not self._has_room(handle, num_tokens):
            handle = _again(handle, num_tokens)
            self._take(handle)
        if num_tokens * self._num_kv_heads * self._widest < _KEEP_GIL:
            return kvedge_layers_append(&handle.layer, keys, values, 1, num_tokens)
        with nogil:
            status = kvedge_layers_append(&handle.layer, keys, values, 1, num_tokens)
        return status

    def _checked(self, keys, values, many, layout):
        """Rows (n, num_kv_heads, channels) in float32; raises if there is no room or a number is not finite."""
        return checks.checked_rows(
            keys, values, self.config, len(self), many=many, layout=layout)

    def _refuse_range(self, keys, values):
        """Raise if rows, keys as the key map has them, are too large for what they are stored in."""
        config, key_map, keys_given = self.config, self.key_map, keys
        if not key_map.is_plain:
            keys = key_map.to_stored(keys)
            checks.check_finite(keys, key_map.text)
        config.key_format.refuse(keys, "keys", config.key_rows)
        checks.refuse_values(values, config)
        if config.recent_dtype:
            refuse(config, key_map, keys_given, values)

    # ---- tokens out ------------------------------------------------------------------------------

    def dequantize(self, view, bint values, int64_t start, int64_t stop, out):
        cdef _Handle handle = view.source
        cdef int64_t first_row = view.start
        cdef float *data = _floats(out)
        cdef kvedge_status status
        with nogil:
            status = kvedge_layer_get(handle.layer, values, first_row, start, stop, data)
        if status != KVEDGE_OK:
            raise KvedgeError(kvedge_strerror(status).decode())
        return out

    # ---- attention -------------------------------------------------------------------------------

    cdef inline bint _is_query(self, object array):
        cdef cnp.ndarray query
        if not _is_plain(array):
            return False
        query = <cnp.ndarray>array
        return (
            (query.ndim == 2 or query.ndim == 3)
            and query.shape[query.ndim - 1] == self._head_dim
            and query.shape[query.ndim - 2] > 0
            and query.shape[query.ndim - 2] % self._num_kv_heads == 0
        )

    def attend(self, query, dict options):
        return self._attend(query, options.pop("out", None), options)

    @cython.final
    cdef object _attend(self, query, out, dict options):
        """One row, plain and with plain options, goes straight to C; all else goes through _attend_to."""
        cdef _Handle handle = self._opened()
        cdef kvedge_attention_options c_options
        cdef kvedge_status status
        cdef cnp.ndarray rows
        cdef int num_heads, threads = 0
        cdef int64_t num_rows, first_row, length = kvedge_layer_range(handle.layer, &first_row)
        cdef float *out_data
        cdef float *query_data
        kvedge_attention_defaults(&c_options)
        if not (
            self.turns is None and self._is_query(query)
            and (out is None or self._is_out(out, <cnp.ndarray>query, handle))
            and _fill_plain(&c_options, &threads, length, self._window, options, False)
        ):
            return self._attend_any(query, out, options)
        rows = <cnp.ndarray>query
        num_heads = <int>rows.shape[rows.ndim - 2]
        num_rows = 1 if rows.ndim == 2 else rows.shape[0]
        window = options.get("window") or self._window
        if not 0 < length >= num_rows or (
            self._window is not None and handle.dropped + first_row > 0
            and num_rows + <int64_t>window - 1 > length
        ):
            return self._attend_any(query, out, options)
        c_options.num_tokens, c_options.first_row = length, first_row
        if out is None:
            out = self._empty_out(rows)
        query_data = _floats(query)
        out_data = _floats(out)
        if num_rows * length * num_heads * self._widest < _KEEP_GIL:
            status = kvedge_attend(
                handle.layer, query_data, num_rows, num_heads, &c_options, threads, out_data, NULL)
        else:
            with nogil:
                status = kvedge_attend(
                    handle.layer, query_data, num_rows, num_heads, &c_options, threads, out_data,
                    NULL)
        if status != KVEDGE_OK:
            self._refuse_attend(query, status)
        return out

    cdef object _attend_any(self, query, out, dict options):
        """`options` are the call's own: they are taken apart."""
        layout = options.get("layout", _NHD)
        cdef bint hnd = _is_hnd(layout)
        cdef _Array asked
        cdef Py_ssize_t num_heads
        cdef bint right = _read(query, &asked) and (asked.ndim == 2 or asked.ndim == 3)
        read = query
        if right:
            num_heads = asked.shape[0 if asked.ndim == 2 or hnd else 1]
            right = (
                asked.shape[asked.ndim - 1] == self._head_dim
                and num_heads > 0 and num_heads % self._num_kv_heads == 0
            )
        if not right:
            read, one_row = checks.as_query(query, self.config, finite=False, layout=layout)
            read = read[0] if one_row else arrays.in_nhd(read, layout)
            _read_ndarray(<cnp.ndarray>read, &asked)
        if self._window is not None and options.get("window") is None:
            options["window"] = self._window
        return _attend_to([self], query, &asked, True, asked.ndim == 2, hnd, out, options)

    cdef inline object _empty_out(self, cnp.ndarray query):
        """An array for the result of a query: shaped as that, but as wide as values."""
        cdef cnp.npy_intp shape[3]
        cdef int axis, last = <int>query.ndim - 1
        for axis in range(last):
            shape[axis] = query.shape[axis]
        shape[last] = self._value_head_dim
        return _empty(query.ndim, shape)

    cdef inline bint _is_out(self, object array, cnp.ndarray query, _Handle handle):
        """Whether the result of a query may be written to `array` as it lies."""
        cdef cnp.ndarray out
        cdef uintptr_t start, query_start
        cdef int axis
        if not _is_plain(array) or not cnp.PyArray_ISWRITEABLE(<cnp.ndarray>array):
            return False
        out = <cnp.ndarray>array
        if out.ndim != query.ndim or out.shape[out.ndim - 1] != self._value_head_dim:
            return False
        for axis in range(out.ndim - 1):
            if out.shape[axis] != query.shape[axis]:
                return False
        start, query_start = <uintptr_t>out.data, <uintptr_t>query.data
        return (
            start + cnp.PyArray_NBYTES(out) <= query_start
            or query_start + cnp.PyArray_NBYTES(query) <= start
        ) and handle.is_apart_from(out)

    def scores(self, query, *, scale=None):
        cdef _Handle handle = self._opened()
        cdef cnp.npy_intp shape[2]
        cdef int64_t first_row, length
        cdef kvedge_status status
        cdef float c_scale = NAN if scale is None else nearest_float(checks.as_float(scale, "scale"))
        if not self._is_query(query) or (<cnp.ndarray>query).ndim != 2:
            query = np.ascontiguousarray(checks.as_query(query, self.config, many=False)[0][0])
        if self.turns is not None:
            return self._scores_turned(query, scale)
        shape[0] = (<cnp.ndarray>query).shape[0]
        length = kvedge_layer_range(handle.layer, &first_row)
        shape[1] = length
        out = _empty(2, shape)
        cdef float *query_data = _floats(query)
        cdef float *out_data = _floats(out)
        cdef int num_heads = <int>shape[0]
        if length == 0:
            checks.check_finite(query, "query")
            return out
        with nogil:
            status = kvedge_scores(
                handle.layer, query_data, num_heads, c_scale, first_row, length, out_data)
        if status != KVEDGE_OK:
            self._refuse_attend(query, status)
        return out

    def _scores_turned(self, query, scale):
        """Scores of a plain query row over keys that are still to be turned."""
        cdef cnp.ndarray logits
        cdef _Handle handle
        cdef int64_t first_row, num_tokens
        cdef float c_scale = NAN if scale is None else nearest_float(checks.as_float(scale, "scale"))
        cdef float *query_data
        cdef int num_heads = <int>(<cnp.ndarray>query).shape[0]
        cdef kvedge_status status
        view = self.view()
        handle = view.source
        out = np.empty((num_heads, view.num_tokens), np.float32)
        checks.check_finite(query, "query")
        for start, stop, turn in ranges_of(self.turns, view.num_dropped, 0, view.num_tokens):
            rows = to_float32(turned(turn, query, back=True)) if turn else query
            query_data = _floats(rows)
            first_row, num_tokens = view.start + start, stop - start
            logits = np.empty((num_heads, num_tokens), np.float32)
            status = kvedge_scores(
                handle.layer, query_data, num_heads, c_scale, first_row, num_tokens, _floats(logits))
            if status != KVEDGE_OK:
                self._refuse_attend(query, status)
            out[:, start:stop] = logits
        return out

    def _refuse_attend(self, query, status):
        """Raise what C refused about a query."""
        checks.check_finite(query, "query")
        _refuse_status(status)


@cython.auto_pickle(False)  # KvLayer pickles
cdef class _LayerFace:
    """The calls of a KvLayer that come often, straight to its store."""

    cdef LayerStore _made

    @property
    def _store(self):
        return self._opened()

    @_store.setter
    def _store(self, store):
        self._made = store

    @cython.final
    cdef inline LayerStore _opened(self):
        if not isinstance(<object>self, _LayerFace):  # a method taken from its class may get any self
            raise TypeError(f"expected a layer, got {checks.describe(self)}")
        if self._made is None:
            raise KvedgeError("this layer was never made: a subclass must call super().__init__()")
        return self._made

    def push(self, keys, values):
        self._opened()._push(keys, values)

    def extend(self, keys, values, *, layout="nhd"):
        self._opened().extend(keys, values, layout=layout)

    def scores(self, query, *, scale=None):
        return self._opened().scores(query, scale=scale)

    def attend(self, query, *, out=None, **options):
        return self._opened()._attend(query, out, options)


cdef bint _fill_plain(
    kvedge_attention_options *c, int *threads, int64_t length, window, dict options, bint with_lse
) except -1:
    """Take the options that most calls pass, given as plain Python numbers in range; else False.

    `window` is that of the layer; return_lse is the caller's, if it may be True.
    """
    cdef double factor
    cdef str name
    if window is not None and <int64_t>window < length:
        c.window = window
    for name, value in options.items():
        if name == "scale" and type(value) is float:
            factor = value
            if not -FLT_MAX <= factor <= FLT_MAX:
                return False
            c.scale = nearest_float(factor)
        elif name == "num_threads" and type(value) is int:
            if not 1 <= value <= _MAX_THREADS:
                return False
            threads[0] = value
        elif name == "window" and type(value) is int:
            if value < 1:
                return False
            c.window = value if value < length else 0  # else it hides nothing, which is none
        elif value is not _DEFAULTS.get(name, options):
            if name != "return_lse" or value is not True or not with_lse:
                return False
    return True


cdef _fill(kvedge_attention_options *c, options):
    """Fill C's options from AttendOptions, which owns the arrays; of a batch's mask that of the first layer."""
    cdef int i, batch
    kvedge_attention_defaults(c)
    c.scale = nearest_float(options.scale)
    c.causal = options.causal
    c.window = options.window
    c.sink_tokens = options.sink_tokens
    c.softcap = nearest_float(options.softcap)
    c.start = options.start
    c.precision_bits = options.precision_bits
    if options.sink_logits is not None:
        c.sink_logits = _floats(options.sink_logits)
    if options.alibi_slopes is not None:
        c.alibi_slopes = _floats(options.alibi_slopes)
    if options.lists is not None:
        c.tokens = <const int32_t *>cnp.PyArray_DATA(options.lists)
        c.token_heads, c.token_width = options.lists.shape[1], options.lists.shape[2]
    if options.mask_bool is not None:
        c.mask = <const uint8_t *>cnp.PyArray_DATA(options.mask_bool)
        batch = options.mask_bool.ndim - 3
        for i in range(3):
            c.mask_strides[i] = options.mask_bool.strides[batch + i]
    if options.mask_bias is not None:
        c.bias = _floats(options.mask_bias)
        batch = options.mask_bias.ndim - 3
        for i in range(3):
            c.bias_strides[i] = options.mask_bias.strides[batch + i] // 4


# ---- several layers, arrays with strides ----------------------------------------------------------

include "native_batch.pxi"

# ---- tasks of a call, measured -------------------------------------------------------------------

include "native_tasks.pxi"

# ---- layers in blocks ----------------------------------------------------------------------------

include "native_paged.pxi"

# ---- states --------------------------------------------------------------------------------------

include "native_states.pxi"

# ---- index keys ----------------------------------------------------------------------------------

include "native_index.pxi"

# ---- the public classes --------------------------------------------------------------------------


def bind():
    """Make the public classes of kvedge's modules as they are now.

    A process initializes an extension once, but may import kvedge again, whose modules are new ones then:
    :mod:`kvedge.backends.select` calls this at each import.
    """
    global AttendOptions, InvalidArgumentError, KeyRule, KvedgeError, LayoutError, NO_MAP, NonFiniteInputError
    global OutOfMemoryError, ShapeMismatchError, UnsupportedIsaError
    global Parts, _batch, arrays, check_heads, checks, empty_parts, kept_rows, layer_keys, memory, openmp, ranges_of, refuse, room, query_turns
    global to_float32, partial, replace, turned, turned_back_next
    from dataclasses import replace
    from functools import partial
    from inspect import signature

    from kvedge import batch as _batch
    from kvedge.core import arrays, checks, memory, openmp
    from kvedge.core.key_map import NO_MAP, KeyRule
    from kvedge.core.lists import check_heads
    from kvedge.core.options import AttendOptions
    from kvedge.errors import (
        InvalidArgumentError, KvedgeError, LayoutError, NonFiniteInputError, OutOfMemoryError,
        ShapeMismatchError, UnsupportedIsaError)
    from kvedge.layer import keys as layer_keys
    from kvedge.layer import room
    from kvedge.layer.layer import KvLayer as BaseKvLayer
    from kvedge.layer.parts import Parts, empty_parts, kept_rows, ranges_of, refuse
    from kvedge.layer.reading import turned_back_next
    from kvedge.paged.store import BlockStoreMethods
    from kvedge.rope import query_turns, to_float32, turned

    for name in ("push", "extend", "attend", "scores"):
        getattr(_LayerFace, name).__doc__ = getattr(BaseKvLayer, name).__doc__
    for function in (attend_batch, append_batch):
        function.__doc__ = getattr(_batch, function.__name__).__doc__
    for function, shown in (
        (_LayerFace.attend, BaseKvLayer.attend),
        (attend_batch, _batch.attend_batch),
    ):
        function.__signature__ = signature(shown)
    for parameter in signature(BaseKvLayer.attend).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            _DEFAULTS[parameter.name] = parameter.default

    class KvLayer(_LayerFace, BaseKvLayer):
        __qualname__ = "KvLayer"
        _store_type = LayerStore

    class BlockStore(_BlockStore, BlockStoreMethods):
        __qualname__ = "BlockStore"

    globals().update(KvLayer=KvLayer, BlockStore=BlockStore)
