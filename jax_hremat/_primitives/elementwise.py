"""What is known of the operations that make each element of a result from few elements of their
operands: how many flops an element costs, and that XLA fuses them."""

from __future__ import annotations

from types import MappingProxyType

from jax_hremat._jax.custom_rules import DETACH

# JAX primitives by the flops that an element costs on the vector units. Functions are counted as
# the multiply-adds of their usual polynomial, or of a special-function unit at a quarter of the
# rate.
_PRIMITIVES = {
    1: """abs add add_any and ceil clz complex conj convert_element_type eq floor ge gt imag
    is_finite le lt max min mul mulhi ne neg not or population_count real reduce_precision round
    select_n shift_left shift_right_arithmetic shift_right_logical sign square sub xor""",
    2: "clamp integer_pow one_minus_square",
    4: "div rem rsqrt sqrt",
    8: "exp exp2 log log2 logistic",
    12: "cbrt cos expm1 log1p sin",
    16: """acos acosh asin asinh atan atan2 atanh cosh erf erf_inv erfc nextafter polynomial pow
    sinh tan tanh""",
    32: "random_bits threefry2x32",
    128: "bessel_i0e bessel_i1e digamma lgamma",
}
# HLO opcodes whose names are not those of the primitives.
_OPCODES = {
    1: """compare convert count-leading-zeros is-finite maximum minimum multiply negate popcnt
    reduce-precision round-nearest-afz round-nearest-even select shift-left shift-right-arithmetic
    shift-right-logical subtract""",
    4: "divide remainder",
    8: "exponential",
    12: "cosine exponential-minus-one log-plus-one sine",
    16: "power",
    32: "rng-bit-generator",
}
# Primitives that move or name elements and compute nothing.
MOVES = frozenset(
    """bitcast_convert_type broadcast_in_dim concatenate copy dynamic_slice gather iota name pad
    reshape rev slice split squeeze stack stop_gradient transpose unstack""".split()
)
# What is made of the primitives above, once it is lowered.
_MADE_OF_THEM = frozenset(
    "custom_jvp_call random_fold_in random_seed random_unwrap random_wrap".split()
) | {DETACH}


def _flops_of(names: dict[int, str]) -> dict[str, int]:
    return {name: flops for flops, each in names.items() for name in each.split()}


# Flops of one element, by JAX primitive and by HLO opcode.
ELEMENT_FLOPS = MappingProxyType(_flops_of(_PRIMITIVES) | _flops_of(_OPCODES))

# Primitives that XLA fuses into the kernels that read or write their operands, so that recomputing
# one needs no separate kernel. `reduce_*` fuse with their producers but end a kernel.
FUSIBLE = MOVES | _MADE_OF_THEM | _flops_of(_PRIMITIVES).keys()
