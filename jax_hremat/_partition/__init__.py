"""Blocks, and the partitioners that choose where they begin."""
