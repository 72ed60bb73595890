"""Many sequences in one pool of blocks, which they share and copy only to write.

:mod:`cache` and :mod:`pool` are the public classes, over the two states of :mod:`state`: what a
pool and a cache hold. A sequence is a table of blocks (:mod:`sequences`); :mod:`owners` counts who
refers to blocks, :mod:`prefixes` finds them by the token ids they were computed from, :mod:`parts`
has those of first and last tokens in another format, :mod:`store` reads and writes one layer's rows
in blocks, and :mod:`readings` keeps what running calls read. The other modules are functions on the
states: :mod:`appending`, :mod:`attention` (:mod:`batch` checks a call over several sequences,
:mod:`cascade` reads once what they share), :mod:`decoding`, :mod:`snapshot`, :mod:`exchange`,
:mod:`file`. A backend adds ``BlockStore`` (kvedge/backends/native_paged.pxi,
kvedge/backends/numpy/paged.py).

The idea and the words are those of vLLM (Kwon et al. 2023, https://arxiv.org/abs/2309.06180).
"""
