"""Flops of convolutions, from the window and the labels that HLO gives them."""

from __future__ import annotations

from math import prod

from jax_hremat._xla.hlo.parse import Instruction, Shape


def convolution_flops(instruction: Instruction, result: Shape, kernel: Shape) -> float:
    """Flops of a forward convolution: a full dot product for each element of its result.

    Multiplications with padding count, since library kernels do them; those with the holes of
    a dilated input do not. The kernel's input features are those of one group.
    """
    labels = (instruction.attribute("dim_labels") or "").split("->")[0].split("_")[1]
    inputs = prod(size for label, size in zip(labels, kernel.dims, strict=True) if label in "i?")
    window = prod(int(size) for size in instruction.window("size"))
    holes = prod(int(factor) for factor in instruction.window("lhs_dilate"))
    return 2.0 * result.size * inputs * window / holes
