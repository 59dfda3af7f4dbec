"""The primitives that XLA fuses into the kernels around them."""

from __future__ import annotations

from jax_hremat._jax.custom_rules import DETACH

# Operations that XLA fuses into the kernels that read or write their operands, so that recomputing
# one needs no separate kernel. `reduce_*` fuse with their producers but end a kernel.
FUSIBLE = frozenset(
    """abs add add_any and acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e
    bitcast_convert_type broadcast_in_dim cbrt ceil clamp clz complex concatenate conj
    convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expand_dims
    expm1 floor ge gt imag integer_pow iota is_finite le lgamma log log1p log2 logistic lt max min
    mul name ne neg nextafter not one_minus_square or pad polynomial population_count pow real
    reduce_precision rem reshape rev round rsqrt select_n shift_left shift_right_arithmetic
    shift_right_logical sign sin sinh slice split sqrt square squeeze stop_gradient sub tan tanh
    transpose xor custom_jvp_call random_bits random_wrap random_unwrap threefry2x32 random_seed
    random_fold_in dynamic_slice gather
    """.split()
) | {DETACH}
