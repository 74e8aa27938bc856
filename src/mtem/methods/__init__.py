"""The methods: one file each, on the contract in `base`, found by name in `registry`."""

from mtem.methods.base import Batch, Context, Method, Update, cross_entropy, functional, reverse, without_dropout
from mtem.methods.registry import METHODS, get

__all__ = [
    "METHODS",
    "Batch",
    "Context",
    "Method",
    "Update",
    "cross_entropy",
    "functional",
    "get",
    "reverse",
    "without_dropout",
]
