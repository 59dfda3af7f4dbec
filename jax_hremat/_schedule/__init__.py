"""The root program: one mode for every block of the chain, and groups of blocks."""
