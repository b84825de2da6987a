"""Defenses: what protects a release, a gradient or a loss; one a file, imported on first use."""

from typing import TYPE_CHECKING

from splitfed.core.lazy_package import make_lazy

if TYPE_CHECKING:
    from splitfed.defenses.adversarial import Adversarial
    from splitfed.defenses.channel_pruning import ChannelPruning
    from splitfed.defenses.distance_correlation import DistanceCorrelation
    from splitfed.defenses.dp_sgd import DpSgd
    from splitfed.defenses.dropout import Dropout
    from splitfed.defenses.gaussian_release import GaussianRelease
    from splitfed.defenses.gradient_compression import GradientCompression
    from splitfed.defenses.gradient_rounding import GradientRounding
    from splitfed.defenses.iso import Iso
    from splitfed.defenses.label_dp import LabelDp
    from splitfed.defenses.laplace_release import LaplaceRelease
    from splitfed.defenses.latent import Latent
    from splitfed.defenses.marvell import Marvell
    from splitfed.defenses.max_norm import MaxNorm
    from splitfed.defenses.mid import Mid
    from splitfed.defenses.mid_labels import MidLabels
    from splitfed.defenses.noise import Noise
    from splitfed.defenses.quantization import Quantization
    from splitfed.defenses.shredder import Shredder
    from splitfed.defenses.top_k import TopK

__all__ = [
    "Adversarial",
    "ChannelPruning",
    "DistanceCorrelation",
    "DpSgd",
    "Dropout",
    "GaussianRelease",
    "GradientCompression",
    "GradientRounding",
    "Iso",
    "LabelDp",
    "LaplaceRelease",
    "Latent",
    "Marvell",
    "MaxNorm",
    "Mid",
    "MidLabels",
    "Noise",
    "Quantization",
    "Shredder",
    "TopK",
]

make_lazy(
    __name__,
    {
        "Adversarial": "adversarial",
        "ChannelPruning": "channel_pruning",
        "DistanceCorrelation": "distance_correlation",
        "DpSgd": "dp_sgd",
        "Dropout": "dropout",
        "GaussianRelease": "gaussian_release",
        "GradientCompression": "gradient_compression",
        "GradientRounding": "gradient_rounding",
        "Iso": "iso",
        "LabelDp": "label_dp",
        "LaplaceRelease": "laplace_release",
        "Latent": "latent",
        "Marvell": "marvell",
        "MaxNorm": "max_norm",
        "Mid": "mid",
        "MidLabels": "mid_labels",
        "Noise": "noise",
        "Quantization": "quantization",
        "Shredder": "shredder",
        "TopK": "top_k",
    },
)
