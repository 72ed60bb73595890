"""The pure-NumPy backend: the same classes and the same stored bytes, without a compiler."""
