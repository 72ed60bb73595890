"""What ``kvedge bench`` runs: one module per benchmark, and what they share.

Benchmarks (each has NAME, SUMMARY, DESCRIPTION, EXAMPLES, add_options, run, as the commands in
:mod:`kvedge.cli` do): :mod:`~kvedge.bench.decode`, :mod:`~kvedge.bench.prefill`,
:mod:`~kvedge.bench.push`, :mod:`~kvedge.bench.threads`, :mod:`~kvedge.bench.sweep`. A further one
is a further module and its name in :mod:`~kvedge.bench.catalog`.

Shared, from the bottom up: shapes and data (:mod:`shapes`, :mod:`workload`), how many copies of a
cache are read in turn (:mod:`copies`), statistics, the round robin that times competitors in one
run (:mod:`roundrobin`), the competitors (:mod:`peers`), tables, JSON and plots.
"""
