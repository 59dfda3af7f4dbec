"""Flax: NNX objects in arguments and results, and module classes; imported on use."""
