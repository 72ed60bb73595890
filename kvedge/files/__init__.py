"""Files of caches: what they hold, written whole or not at all, read with no trust in them."""
