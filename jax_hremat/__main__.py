"""`python -m jax_hremat` is the command `jax-hremat`."""

from jax_hremat._cli.commands import main

main(prog_name="jax-hremat")
