"""States: what a layer keeps of the past where it is not one row per token."""
