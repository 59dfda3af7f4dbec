"""JAX: every `jax._src` import and every branch by JAX's version is in this package.

Supported: JAX 0.10.2 and newer. Each function says what differs between versions and why it is
needed.
"""
