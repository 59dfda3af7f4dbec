"""HLO text -> buffers, their lifetimes, kernels and their times."""
