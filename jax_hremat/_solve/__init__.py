"""The integer programs, from the values of a block to the whole chain, and the solver."""
