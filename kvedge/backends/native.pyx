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
from libc.stdint cimport uintptr_t
from libc.string cimport memset

import os

import numpy as np

cnp.import_array()

cdef dict _DEFAULTS = {}  # of the options of attend, by their names

# Below about this many numbers, giving the GIL away and taking it back costs more than the work.
cdef enum:
    _KEEP_GIL = 1 << 14
    _MAX_THREADS = 1024
    _ROOM = 64  # kvedge.layer.parts has it too
    _LEAST_TOKENS = 16  # kvedge.core.key_map.LEAST_TOKENS


# ---- the library --------------------------------------------------------------------------------

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
      volatile double given = number;
      volatile float nearest;
      const uint32_t before = kvedge_take_default_mode();
      nearest = (float)given;
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


def set_num_threads(int num_threads):
    """Set how many threads a call uses by default; kvedge.set_num_threads checks the number."""
    kvedge_set_num_threads(num_threads)


def tolerance_counts():
    cdef int64_t seen, dropped
    kvedge_tolerance_counts(&seen, &dropped)
    return seen, dropped


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


include "native_arrays.pxi"


cdef class _Handle:
    """A kvedge_layer, what it points to and what that is: of one moment. Whoever is in a C call holds a reference, so
    a layer may take other slabs (to grow) while another thread still attends to the old ones."""

    cdef kvedge_layer *layer
    cdef void *header
    cdef object slabs, config, key_map
    cdef int64_t dropped          # tokens dropped before row 0 of these slabs
    cdef uintptr_t low, high  # all slabs lie between these addresses

    cdef bint is_apart_from(self, cnp.ndarray array):
        """Whether `array` surely shares no byte with the slabs."""
        cdef uintptr_t start = <uintptr_t>cnp.PyArray_DATA(array)
        return start >= self.high or start + cnp.PyArray_NBYTES(array) <= self.low

    def __dealloc__(self):
        kvedge_quiesce()  # a late helper may still look at the slabs
        PyMem_Free(self.header)


cdef _Handle _attach(config, slabs, key_map):
    cdef kvedge_layer_config c_config
    cdef kvedge_slabs c_slabs
    cdef size_t size
    memset(&c_config, 0, sizeof(c_config))
    memset(&c_slabs, 0, sizeof(c_slabs))
    cdef int format_code = config.key_format.c_code
    cdef int scale_code = config.scale_type.c_code
    cdef int value_code = config.value_format.c_code
    cdef bint keys_scaled = config.key_format.has_scales
    cdef bint values_scaled = config.value_format.has_scales
    c_config.format = <kvedge_format>format_code
    c_config.scale_type = <kvedge_scale_type>scale_code
    c_config.capacity = config.capacity
    c_config.num_kv_heads = config.num_kv_heads
    c_config.head_dim = config.head_dim
    c_config.group_size = config.group_size
    c_config.value_head_dim = config.value_head_dim
    c_config.value_format = 1 + value_code  # KVEDGE_VALUES
    c_config.value_rotation = config.value_rotation
    c_slabs.key_codes = cnp.PyArray_DATA(slabs.key_codes)
    c_slabs.value_codes = cnp.PyArray_DATA(slabs.value_codes)
    c_slabs.key_scales = cnp.PyArray_DATA(slabs.key_scales) if keys_scaled else NULL
    c_slabs.value_scales = cnp.PyArray_DATA(slabs.value_scales) if values_scaled else NULL
    size = kvedge_layer_header_bytes(&c_config)
    cdef _Handle handle = _Handle()
    handle.slabs, handle.config, handle.key_map = slabs, config, key_map
    handle.dropped = 0
    starts = [slab.ctypes.data for slab in slabs]
    handle.low = min(starts)
    handle.high = max(start + slab.nbytes for start, slab in zip(starts, slabs))
    handle.header = PyMem_Malloc(size)
    if handle.header == NULL:
        raise OutOfMemoryError(f"cannot allocate {size} bytes for a layer")
    status = kvedge_layer_attach(handle.header, size, &c_config, &c_slabs, &handle.layer)
    if status != KVEDGE_OK:
        raise KvedgeError(kvedge_strerror(status).decode())
    return handle


@cython.final
cdef class _RowsAt:
    """Rows of the caller's, for Python code that puts them into a layer."""

    cdef const kvedge_array *keys
    cdef const kvedge_array *values

    def append(self, layer, int64_t first, int64_t num_tokens):
        """Append some of the rows to a layer of the same shape."""
        cdef kvedge_status status = (<LayerStore>layer)._append_range(self.keys, self.values, first, num_tokens)
        if status != KVEDGE_OK:
            raise KvedgeError(kvedge_strerror(status).decode())


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
    cdef int64_t _recent, _sinks, _kept  # its config's, and what kept_rows says of it
    cdef bint _in_runs
    cdef public object parts            # LayerParts or None
    cdef public object turns            # kvedge.rope.Turns or None
    cdef public int64_t evicted_at      # position of the last eviction; 0: none

    def open(self, config, slabs=None):
        self._take(None)
        self.parts = self.turns = None
        self.frozen = self.key_map_is_auto = False
        self.evicted_at = 0
        self.key_rule = KeyRule()
        self._num_kv_heads = config.num_kv_heads
        self._head_dim = config.head_dim
        self._value_head_dim = config.value_head_dim
        self._widest = config.widest
        self._limit = checks.MAX_CAPACITY if config.limit is None else config.limit
        self._window = config.window
        self._recent, self._sinks = config.recent, config.sinks
        self._in_runs = config.in_runs
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
            self.set_len(self.held().num_tokens)  # without what it had not come to the end of
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

    def __len__(self):
        """Tokens stored."""
        if self.parts is not None:
            return self.held().num_tokens
        return kvedge_layer_len(self._opened().layer)

    def held(self):
        # The parts first: what they end with is in the rows by then, and what is needed of the parts stays.
        parts = None if self.parts is None else self.parts.now
        cdef _Handle handle = self._opened()
        cdef int64_t start, length = kvedge_layer_range(handle.layer, &start), end
        if parts is not None:
            end = parts.end
            length = max(0, min(length, end - handle.dropped - start))
        return memory.Held(handle.slabs, start, length, handle.dropped + start, handle, parts)

    def end(self):
        cdef _Handle handle = self._opened()
        cdef int64_t start, length
        if self.parts is not None:
            held = self.held()
            return held.num_dropped + held.num_tokens
        length = kvedge_layer_range(handle.layer, &start)
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
        cdef int64_t start, length
        if key_map is None:
            key_map = old.key_map
        handle = _attach(config, slabs, key_map)
        if key_map.offset is not None:
            kvedge_layer_set_key_offset(handle.layer, _floats(key_map.offset))
        if key_map.scale is not None:
            kvedge_layer_set_key_scale(handle.layer, _floats(key_map.scale))
        if old is not None:
            length = kvedge_layer_range(old.layer, &start)
            handle.dropped = old.dropped + start
            kvedge_layer_set_len(handle.layer, length)
            kvedge_layer_filled(handle.layer, length, kvedge_layer_written(old.layer) - length)
        self._take(handle)

    def binding(self):
        cdef _Handle handle = self._opened()
        return handle, kvedge_layer_len(handle.layer)

    def rebind(self, binding):
        cdef _Handle handle = binding[0]
        kvedge_layer_set_len(handle.layer, binding[1])
        self._take(handle)

    def filled(self, int64_t position, int64_t num_tokens):
        """Rows were copied to the slabs, within capacity."""
        cdef _Handle handle = self._opened()
        if kvedge_layer_filled(handle.layer, position, num_tokens) != KVEDGE_OK:
            raise KvedgeError(f"tokens {position} to {position + num_tokens} are not in the layer")

    def set_len(self, n):
        cdef _Handle handle = self._opened()
        cdef int64_t start
        kvedge_layer_set_len(handle.layer, n)
        if self.parts is not None:
            kvedge_layer_range(handle.layer, &start)
            self.parts.set_end(handle.dropped + start + n)

    def drop(self, int64_t n):
        kvedge_layer_drop_first(self._opened().layer, n)

    def restart(self, int64_t num_dropped=0, parts=None):
        cdef _Handle handle = self._opened()
        if self.parts is not None and parts is None:
            parts = self.parts.empty(num_dropped)
        kvedge_layer_set_len(handle.layer, 0)
        kvedge_layer_compact(handle.layer)
        handle.dropped = num_dropped
        self.evicted_at = 0
        self.turns = None
        if self.parts is not None:
            self.parts.now = parts

    def set_key_map(self, key_map):
        # A C layer takes it only while it is empty: so this makes another over the same slabs.
        if key_map.offset is not None:
            key_map = key_map._replace(offset=np.ascontiguousarray(key_map.offset, np.float32))
        if key_map.scale is not None:
            key_map = key_map._replace(scale=np.ascontiguousarray(key_map.scale, np.float32))
        self.bind(self.slabs, self.config, key_map)

    # ---- removing and moving ---------------------------------------------------------------------

    def keeping(self, indices):
        return partial(self._keep, self._opened(), np.ascontiguousarray(indices, np.int64))

    def _keep(self, _Handle handle, cnp.ndarray tokens):
        cdef const int64_t *positions = <const int64_t *>cnp.PyArray_DATA(tokens)
        cdef int64_t num_tokens = tokens.shape[0]
        cdef kvedge_status status
        with nogil:
            status = kvedge_layer_keep(handle.layer, positions, num_tokens)
        if status != KVEDGE_OK:
            raise KvedgeError(kvedge_strerror(status).decode())

    def evicted(self, int64_t kept):
        cdef _Handle handle = self._opened()
        cdef int64_t start, length = kvedge_layer_range(handle.layer, &start)
        kvedge_layer_set_len(handle.layer, kept)
        handle.dropped += length - kept

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
                handle is not None and self.parts is None and self.turns is None
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
        cdef bint decides = num_tokens > 0 and self.key_map_is_open()
        cdef _Array turned
        cdef kvedge_array turned_rows
        turns = self.turns
        before = layer_keys.mark(self) if decides else None
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
            if status == KVEDGE_OK:
                return
            # What is refused besides room raises before the layer moves.
            rows, value_tokens = self._checked(keys, values, many, layout)
            self._refuse_range(rows, value_tokens)
            if status == KVEDGE_ERROR_CAPACITY:
                room.reserve(self, num_tokens)
                status = self._append_rows(key_rows, value_rows, num_tokens)
            if status != KVEDGE_OK:
                raise KvedgeError(kvedge_strerror(status).decode())
        except BaseException:
            self.turns = turns
            if decides:
                layer_keys.return_to(self, before)
            raise

    cdef kvedge_status _append_rows(
        self, const kvedge_array *keys, const kvedge_array *values, int64_t num_tokens
    ) except *:
        if self.parts is not None:
            return self._append_parts(keys, values, num_tokens)
        return self._append_to_slabs(keys, values, num_tokens)

    cdef kvedge_status _append_parts(
        self, const kvedge_array *keys, const kvedge_array *values, int64_t num_tokens
    ) except *:
        """Append rows that are held in another format too: there first, so that the rows here end with all of them."""
        cdef kvedge_status status
        cdef kvedge_layer *layers[2]
        cdef kvedge_array both_keys[2]
        cdef kvedge_array both_values[2]
        cdef _Handle last, handle = self._opened()
        last = self._last_alone(handle, num_tokens)
        if last is not None:
            layers[0], layers[1] = last.layer, handle.layer
            both_keys[0], both_keys[1] = keys[0], keys[0]
            both_values[0], both_values[1] = values[0], values[0]
            if num_tokens * self._num_kv_heads * self._widest < _KEEP_GIL:
                status = kvedge_layers_append(layers, both_keys, both_values, 2, num_tokens)
            else:
                with nogil:
                    status = kvedge_layers_append(layers, both_keys, both_values, 2, num_tokens)
            if status == KVEDGE_OK:
                return status
        made = self.parts.begin(self.end(), num_tokens)
        status = (<LayerStore>made.first.store)._append_range(keys, values, 0, made.sinks)
        if status == KVEDGE_OK:
            status = (<LayerStore>made.last.store)._append_range(
                keys, values, made.skipped, num_tokens - made.skipped)
        if status == KVEDGE_OK:
            status = self._append_to_slabs(keys, values, num_tokens)
        if status == KVEDGE_OK and self.config.in_runs:
            status = self._append_runs(made, keys, values)
        elif status == KVEDGE_OK:
            self.parts.commit(made)
        if status != KVEDGE_OK:
            self.parts.take_back(made)
        return status

    cdef _Handle _last_alone(self, _Handle handle, int64_t num_tokens):
        """The last tokens' handle, where tokens that are appended come to it and to the rows alone; else None.

        That is where none of them is a first one or fills a run, and the last tokens have room: nearly always. Then the
        parts stay as they are.
        """
        now = self.parts.now
        cdef tuple parts = <tuple>now
        cdef _Handle last = (<LayerStore>parts[1][0])._opened(), other
        cdef int64_t first_row, end = kvedge_layer_range(handle.layer, &first_row), cut, position = parts[1][1]
        cdef int64_t since = parts[3], held = kvedge_layer_len(last.layer), room = (<LayerStore>parts[1][0])._limit
        if self._kept == 0 or num_tokens < 1 or num_tokens > self._limit - end:
            return None
        end += handle.dropped + first_row
        cut = end // 32 * 32 if self._in_runs else end
        if position + held != end or position > cut or since > cut or num_tokens > room - held:
            return None
        if room > self._kept + max(num_tokens if self._recent else 0, _ROOM):
            return None
        if end < self._sinks:
            other = (<LayerStore>parts[0][0])._opened()
            if <int64_t>parts[0][1] + kvedge_layer_len(other.layer) == end:
                return None
        if self._in_runs:
            other = (<LayerStore>parts[2][0])._opened()
            if end + num_tokens >= cut + 32 or <int64_t>parts[2][1] + kvedge_layer_len(other.layer) != cut:
                return None
        return last

    cdef kvedge_status _append_runs(
        self, made, const kvedge_array *keys, const kvedge_array *values
    ) except *:
        """Encode the runs that appended tokens fill; the rows and the last tokens have them already."""
        cdef kvedge_status status = KVEDGE_OK
        cdef _Handle handle = self._opened()
        cdef _RowsAt rows = _RowsAt()
        rows.keys, rows.values = keys, values
        try:
            self.parts.commit(made, self.parts.runs_of(made, rows.append))
        except BaseException:
            kvedge_layer_set_len(handle.layer, kvedge_layer_len(handle.layer) - <int64_t>made.n)
            self.parts.take_back(made)
            raise
        return status

    cdef kvedge_status _append_range(
        self, const kvedge_array *keys, const kvedge_array *values, int64_t first, int64_t num_tokens
    ) except *:
        """Append some of the rows."""
        cdef kvedge_array of_keys = keys[0], of_values = values[0]
        if num_tokens == 0:
            return KVEDGE_OK
        of_keys.data = <char *>of_keys.data + first * of_keys.token_stride
        of_values.data = <char *>of_values.data + first * of_values.token_stride
        return self._append_to_slabs(&of_keys, &of_values, num_tokens)

    cdef kvedge_status _append_to_slabs(
        self, const kvedge_array *keys, const kvedge_array *values, int64_t num_tokens
    ):
        cdef _Handle handle = self._opened()
        cdef kvedge_status status
        if num_tokens > self._limit - kvedge_layer_len(handle.layer):
            return KVEDGE_ERROR_CAPACITY
        if num_tokens * self._num_kv_heads * self._widest < _KEEP_GIL:
            return kvedge_layer_append_arrays(handle.layer, keys, values, num_tokens)
        with nogil:
            status = kvedge_layer_append_arrays(handle.layer, keys, values, num_tokens)
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
        if self.parts is not None:
            self.parts.refuse(keys_given, values)

    # ---- tokens out ------------------------------------------------------------------------------

    def dequantize(self, held, bint values, int64_t start, int64_t stop, out):
        if held.parts is None:
            return self._dequantize_rows(held, values, start, stop, out)
        for part in parts_of(held, self.config):
            first, last = max(start, part.start), min(stop, part.stop)
            if first < last:
                layer = self if part.store is None else part.store
                own = held if part.store is None else part.store.held()
                at = part.at + first - part.start
                (<LayerStore>layer)._dequantize_rows(
                    own, values, at, at + last - first, out[first - start : last - start])
        return out

    cdef _dequantize_rows(self, held, bint values, int64_t start, int64_t stop, out):
        cdef _Handle handle = held.source
        cdef int64_t row = held.start + start
        cdef float *data = _floats(out)
        cdef kvedge_status status
        with nogil:
            status = kvedge_layer_get_rows(handle.layer, values, row, stop - start, data)
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

    def attend(self, query, options):
        cdef dict rest = dict(options)
        return self._attend(query, rest.pop("out", None), rest)

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
            self.parts is None and self.turns is None and self._is_query(query)
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
        if self.parts is not None or self.turns is not None:
            return self._scores_of_parts(query, scale)
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

    def _scores_of_parts(self, query, scale):
        """Scores of a plain query row, over the tokens where they are read."""
        cdef cnp.ndarray logits
        cdef LayerStore layer
        cdef _Handle handle
        cdef int64_t first_row, num_tokens
        cdef float c_scale = NAN if scale is None else nearest_float(checks.as_float(scale, "scale"))
        cdef float *query_data
        cdef int num_heads = <int>(<cnp.ndarray>query).shape[0]
        cdef kvedge_status status
        held = self.held()
        out = np.empty((num_heads, held.num_tokens), np.float32)
        checks.check_finite(query, "query")
        for part in parts_of(held, self.config):
            own = held if part.store is None else part.store.held()
            handle = own.source
            for start, stop, turn in ranges_of(self.turns, held.num_dropped, part):
                rows = to_float32(turned(turn, query, back=True)) if turn else query
                query_data = _floats(rows)
                first_row, num_tokens = own.start + part.at + start - part.start, stop - start
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
        elif name == "tolerance" and type(value) is float:
            if not 0 <= nearest_float(value) < 1:
                return False
            c.tolerance = nearest_float(value)
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
    c.tolerance = nearest_float(options.tolerance)
    if options.sink_logits is not None:
        c.sink_logits = _floats(options.sink_logits)
    if options.alibi_slopes is not None:
        c.alibi_slopes = _floats(options.alibi_slopes)
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

# ---- layers in blocks ----------------------------------------------------------------------------

include "native_paged.pxi"

# ---- states --------------------------------------------------------------------------------------

include "native_states.pxi"

# ---- the public classes --------------------------------------------------------------------------


def bind():
    """Make the public classes of kvedge's modules as they are now.

    A process initializes an extension once, but may import kvedge again, whose modules are new ones then:
    :mod:`kvedge.backends.select` calls this at each import.
    """
    global AttendOptions, InvalidArgumentError, KeyRule, KvedgeError, LayoutError, NO_MAP, NonFiniteInputError
    global OutOfMemoryError, ShapeMismatchError, UnsupportedIsaError
    global _batch, arrays, checks, kept_rows, layer_keys, memory, ranges_of, room, parts_of, query_turns, to_float32
    global partial, turned, turned_back_next, _attend_and_note
    from functools import partial
    from inspect import signature

    from kvedge import batch as _batch
    from kvedge.cache.cache import KVCache
    from kvedge.core import arrays, checks, memory, registry
    from kvedge.core.key_map import NO_MAP, KeyRule
    from kvedge.core.options import AttendOptions
    from kvedge.errors import (
        InvalidArgumentError, KvedgeError, LayoutError, NonFiniteInputError, OutOfMemoryError,
        ShapeMismatchError, UnsupportedIsaError)
    from kvedge.layer import keys as layer_keys
    from kvedge.layer import room
    from kvedge.layer.layer import KvLayer
    from kvedge.layer.parts import kept_rows, ranges_of, parts_of
    from kvedge.layer.reading import turned_back_next
    from kvedge.layer.types import layer_classes
    from kvedge.paged.store import BlockStoreMethods
    from kvedge.rope import query_turns, to_float32, turned

    _attend_and_note = KVCache.attend
    for name in ("push", "extend", "attend", "scores"):
        getattr(_LayerFace, name).__doc__ = getattr(KvLayer, name).__doc__
    for function in (attend_batch, append_batch):
        function.__doc__ = getattr(_batch, function.__name__).__doc__
    for function, shown in (
        (_LayerFace.attend, KvLayer.attend),
        (_attend_of_cache, KVCache.attend),
        (attend_batch, _batch.attend_batch),
    ):
        function.__signature__ = signature(shown)
    for each in signature(KvLayer.attend).parameters.values():
        if each.kind is each.KEYWORD_ONLY:
            _DEFAULTS[each.name] = each.default
    layer_types = layer_classes(__name__, LayerStore, _LayerFace)
    cache = {
        "__doc__": KVCache.__doc__,
        "__module__": __name__,
        "_layer_types": layer_types,
        "attend": _attend_of_cache,
    }
    _attend_of_cache.__name__, _attend_of_cache.__qualname__ = "attend", "KVCache.attend"
    _attend_of_cache.__doc__ = KVCache.attend.__doc__
    made = [
        *layer_types.values(),
        registry.backend_class(type("KVCache", (KVCache,), cache)),
        registry.backend_class(
            type("BlockStore", (_BlockStore, BlockStoreMethods), {"__module__": __name__})
        ),
    ]
    globals().update({kind.__name__: kind for kind in made})


# KVCache.attend, straight to the C of the layer's store.
def _attend_of_cache(self, layer, query, *, out=None, **options):
    state = self._state
    cdef tuple stores = state.store_at
    if layer.__class__ is not int or not 0 <= layer < len(stores):
        layer = checks.check_layer(layer, len(stores))
    if state.num_query_heads is not None:
        self._check_query_heads(layer, query, options.get("layout", _NHD))
    cdef LayerStore target = stores[layer]
    if target is None:
        raise state.no_tokens(layer, "attend()")
    if state.eviction is not None:  # which notes the query
        return _attend_and_note(self, layer, query, **options | ({} if out is None else {"out": out}))
    try:
        return target._attend(query, out, options)
    except OutOfMemoryError:
        raise
    except MemoryError as error:
        raise memory.out_of_memory(error, "the result of attention") from error
