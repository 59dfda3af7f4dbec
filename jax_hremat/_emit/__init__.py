"""From a `Program` and a `Region` tree to a function with nested `jax.checkpoint`s."""
