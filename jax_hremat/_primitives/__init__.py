"""What is known about primitives: the work of each and of kernels that are only called."""
