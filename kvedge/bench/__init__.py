"""What ``kvedge bench`` runs: one module per benchmark, and what they share.

Benchmarks are the modules that :mod:`~kvedge.bench.catalog` lists, each with what
:class:`~kvedge.bench.benchmark.Benchmark` asks for. A further one is a further module and its name
there.

Shared, from the bottom up: shapes and data (:mod:`shapes`, :mod:`workload`), how many copies of a
cache are read in turn (:mod:`copies`), statistics, the round robin that times competitors in one
run (:mod:`roundrobin`), the competitors (:mod:`peers`), tables, JSON and plots.
"""
