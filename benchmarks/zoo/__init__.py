"""Ordinary Flax models to plan rematerialization for."""

from benchmarks.zoo import densenet, encdec, gpt, llama, lstm, resnet, unet
from benchmarks.zoo.base import Problem, make, names

__all__ = [
    "Problem",
    "densenet",
    "encdec",
    "gpt",
    "llama",
    "lstm",
    "make",
    "names",
    "resnet",
    "unet",
]
