"""The models: what a method trains, on the contract in `base`, found by name or directory in `registry`."""

from mtem.models.registry import BIGCN, create, find, get_class, load

__all__ = ["BIGCN", "create", "find", "get_class", "load"]
