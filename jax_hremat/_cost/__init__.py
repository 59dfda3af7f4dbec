"""The cost of a block under one option."""
