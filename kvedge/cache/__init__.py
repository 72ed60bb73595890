"""The key/value cache of a whole model."""
