"""What was computed for sequences of tokens, kept in a folder: :class:`kvedge.PrefixStore`."""
