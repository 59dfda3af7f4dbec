"""Ordinary Flax models to plan rematerialization for."""

from benchmarks.zoo import densenet, encdec, gpt, llama, lstm, moe, resnet, unet, vit
from benchmarks.zoo.base import Problem, Remat, Size, make, names

__all__ = [
    "Problem",
    "Remat",
    "Size",
    "densenet",
    "encdec",
    "gpt",
    "llama",
    "lstm",
    "make",
    "moe",
    "names",
    "resnet",
    "unet",
    "vit",
]
