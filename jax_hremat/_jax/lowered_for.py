"""A no-op on a value that checks, at lowering, which platform the step is lowered for.

The platform that a step will run on is known only at lowering: a function is traced before that,
and may be lowered for a device that is not attached. Compiler options are not known even then.
"""

from __future__ import annotations

import warnings
from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_hremat._jax.lowering import platforms_of
from jax_hremat._shared.errors import HRematWarning


def lowered_for(value: Any, platform: str, target: str) -> Any:
    """The value; warns if the program it is in is lowered only for other platforms.

    Args:
        value: An array that the step reads.
        platform: The platform that is expected, "cpu" or "cuda".
        target: The name of the target of that platform, for the warning.
    """
    return lowered_for_p.bind(value, platform=platform, target=target)


lowered_for_p = Primitive("hremat_lowered_for")
lowered_for_p.def_impl(lambda value, **_: value)
lowered_for_p.def_abstract_eval(lambda aval, **_: aval)


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    return lowered_for_p.bind(*primals, **params), tangents[0]


def _batch(values: Any, axes: Any, **params: Any) -> Any:
    return lowered_for_p.bind(*values, **params), axes[0]


def _lower(ctx: Any, value: Any, *, platform: str, target: str) -> Any:
    platforms = platforms_of(ctx)
    if platform not in platforms:
        warnings.warn(
            f"a plan certified for {target!r}, of the platform {platform!r}, is lowered for "
            f"{', '.join(platforms)}. The values are right; the peak that its certificate states "
            f"and the step time are those of {target!r}. Make a plan for this device, or certify "
            f"this one again with `jax_hremat.certify`",
            HRematWarning,
            stacklevel=2,
        )
    return [value]


ad.primitive_jvps[lowered_for_p] = _jvp
batching.primitive_batchers[lowered_for_p] = _batch
mlir.register_lowering(lowered_for_p, _lower)
