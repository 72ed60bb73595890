"""kvedge's C API from Cython, without the GIL: ``python setup.py build_ext --inplace``, then ``import attend``."""

from kvedge cimport (
    KVEDGE_OK,
    kvedge_attend,
    kvedge_layer,
    kvedge_layer_append,
    kvedge_layer_config,
    kvedge_layer_create,
    kvedge_layer_destroy,
    kvedge_status,
    kvedge_strerror,
)


cdef class Layer:
    """One layer of int8 keys and values."""

    cdef kvedge_layer *layer
    cdef kvedge_layer_config config

    def __cinit__(self, int capacity, int num_kv_heads, int head_dim):
        self.config = kvedge_layer_config(
            capacity=capacity, num_kv_heads=num_kv_heads, head_dim=head_dim)
        check(kvedge_layer_create(&self.config, NULL, &self.layer))

    def __dealloc__(self):
        kvedge_layer_destroy(self.layer)

    def step(self, float[:, ::1] key, float[:, ::1] value, float[:, ::1] query, float[:, ::1] out):
        """Append a token, key and value (num_kv_heads, head_dim), and attend: out (num_heads, head_dim)."""
        cdef int heads = self.config.num_kv_heads, dim = self.config.head_dim
        cdef kvedge_status status
        if key.shape[0] != heads or key.shape[1] != dim:
            raise ValueError(f"key must have shape ({heads}, {dim})")
        if value.shape[0] != heads or value.shape[1] != dim:
            raise ValueError(f"value must have shape ({heads}, {dim})")
        if query.shape[1] != dim or out.shape[0] != query.shape[0] or out.shape[1] != dim:
            raise ValueError(f"query and out must have shape (num_heads, {dim})")
        with nogil:
            status = kvedge_layer_append(self.layer, &key[0, 0], &value[0, 0], 1)
            if status == KVEDGE_OK:
                status = kvedge_attend(
                    self.layer, &query[0, 0], 1, <int>query.shape[0], NULL, 1, &out[0, 0], NULL)
        check(status)


cdef int check(kvedge_status status) except -1:
    if status != KVEDGE_OK:
        raise RuntimeError(kvedge_strerror(status).decode())
    return 0
