"""What the command line and the benchmarks share: exit codes, tables, sizes, values of options."""
