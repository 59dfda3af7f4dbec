"""Ordinary Flax models to plan rematerialization for."""

from benchmarks.zoo import encdec, gpt, resnet, unet
from benchmarks.zoo.base import Problem, make, names

__all__ = ["Problem", "encdec", "gpt", "make", "names", "resnet", "unet"]
