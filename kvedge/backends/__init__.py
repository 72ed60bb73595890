"""What stores and attends: the compiled backend, and NumPy. :mod:`select` picks one at import.

Both provide the same names: KvLayer and BlockStore, and what calls of several layers and states do.
"""
