"""The command `jax-hremat`."""
