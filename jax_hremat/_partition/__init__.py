"""Blocks, and the partitioners that say where they begin."""
