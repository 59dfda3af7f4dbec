"""All tables."""

from __future__ import annotations

from differential import (
    arguments,
    control_flow,
    custom_rules,
    dtypes,
    linear_algebra,
    linen_modules,
    mutable_state,
    nnx_modules,
    other_libraries,
    published_models,
    random_keys,
    sharded,
    training_steps,
    transforms,
    travel,
)
from differential.program import programs_in

PROGRAMS = programs_in(
    control_flow,
    custom_rules,
    random_keys,
    linear_algebra,
    dtypes,
    mutable_state,
    linen_modules,
    nnx_modules,
    other_libraries,
    published_models,
    training_steps,
    transforms,
    sharded,
    travel,
    arguments,
)
