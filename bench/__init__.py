"""What maintainers measure; in no wheel. ``python -m bench NAME``, and programs of their own."""
