"""What operations and kernels compute and move: one registry for every model of time."""
