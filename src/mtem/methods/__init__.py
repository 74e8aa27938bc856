"""The methods: one file each, on the contract in `base`, found by name in `registry`."""

from mtem.methods.base import (
    Batch,
    Context,
    Method,
    StepLog,
    Update,
    cross_entropy,
    functional,
    reverse_gradient,
    without_dropout,
)
from mtem.methods.registry import METHODS, get

__all__ = [
    "METHODS",
    "Batch",
    "Context",
    "Method",
    "StepLog",
    "Update",
    "cross_entropy",
    "functional",
    "get",
    "reverse_gradient",
    "without_dropout",
]
