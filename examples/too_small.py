"""What a budget that is too small says, and what can be done about it.

python examples/too_small.py
"""

import jax
import jax.numpy as jnp

import jax_hremat


def loss_fn(params: list[tuple[jax.Array, jax.Array]], x: jax.Array) -> jax.Array:
    for w_in, w_out in params:
        x = x + jax.nn.gelu(x @ w_in) @ w_out
    return jnp.mean(x**2)


def main(config: jax_hremat.PlannerConfig | None = None) -> jax_hremat.RematPlan:
    """Asks for too little, reads the refusal, and takes the plan that comes with it."""
    params = [(jnp.full((64, 256), 0.01), jnp.full((256, 64), 0.01)) for _ in range(6)]
    x = jax.ShapeDtypeStruct((4096, 64), jnp.float32)
    try:
        jax_hremat.plan_remat(loss_fn, budget="1MiB", config=config)(params, x)
    except jax_hremat.InfeasibleBudgetError as error:
        print(f"refused: {error}\n")
        least, plan = error.min_budget_bytes, error.plan
    assert plan is not None
    print(f"at {least} bytes there is one: {plan!r}")
    return plan


if __name__ == "__main__":
    main()
