"""From HLO text to buffers with their lifetimes, and kernels with their times."""
