"""What stores and attends: the compiled backend, and NumPy. :mod:`select` picks one at import.

Both provide the same names: QuantizedKvLayer, Float32KvLayer, KVCache and BlockStore.
"""
