"""The models that methods train: the contract in `base`, and every kind of model by name or directory in `registry`."""

from mtem.models.registry import create, find, get_class, load, names

__all__ = ["create", "find", "get_class", "load", "names"]
