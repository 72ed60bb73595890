"""Many sequences in one pool of blocks, which they share and copy only to write.

:mod:`owners` counts who refers to blocks, :mod:`pool` holds them, :mod:`prefixes` finds blocks by
the token ids they were computed from, :mod:`store` reads and writes one layer's rows in blocks,
:mod:`recent` has those of first and last tokens in another format.
:mod:`sequences` is the table of one sequence, :mod:`readings` keeps what running calls read,
:mod:`batch` checks attention over several sequences, :mod:`cascade` reads what they share once;
:mod:`facts`, :mod:`attention` and :mod:`cache` are the PagedKvCache. A backend adds ``BlockStore``
(kvedge/backends/native_paged.pxi, kvedge/backends/numpy/paged.py).

The idea and the words are those of vLLM (Kwon et al. 2023, https://arxiv.org/abs/2309.06180).
"""
