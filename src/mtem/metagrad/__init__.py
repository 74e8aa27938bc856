"""The gradient of the source loss in every entropy index: engines by automatic differentiation, and layer by layer."""

from mtem.metagrad.autograd import (
    ENGINES,
    TSALLIS,
    InnerLoss,
    MetaGradient,
    Params,
    index_gradient,
    math_attention,
    meta_gradient,
    normalized,
)

__all__ = [
    "ENGINES",
    "TSALLIS",
    "InnerLoss",
    "MetaGradient",
    "Params",
    "index_gradient",
    "math_attention",
    "meta_gradient",
    "normalized",
]
