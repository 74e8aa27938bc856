"""The gradient of the source loss in every entropy index.

``autograd`` computes it by automatic differentiation (three engines), ``layerwise`` from the layers of one recorded pass.
"""

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
    tsallis_loss,
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
    "tsallis_loss",
]
