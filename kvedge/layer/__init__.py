"""The keys and values of one layer: what both backends share of it."""
