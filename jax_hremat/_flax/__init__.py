"""Flax NNX objects in arguments and results."""
