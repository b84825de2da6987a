"""Defenses of releases, gradients, labels and weights; one a file, imported on first use."""

from typing import TYPE_CHECKING

from splitfed.core.lazy_package import make_lazy

if TYPE_CHECKING:
    from splitfed.defenses.adversarial import Adversarial as Adversarial
    from splitfed.defenses.channel_pruning import ChannelPruning as ChannelPruning
    from splitfed.defenses.distance_correlation import DistanceCorrelation as DistanceCorrelation
    from splitfed.defenses.dp_sgd import DpSgd as DpSgd
    from splitfed.defenses.dropout import Dropout as Dropout
    from splitfed.defenses.gaussian_release import GaussianRelease as GaussianRelease
    from splitfed.defenses.gradient_compression import GradientCompression as GradientCompression
    from splitfed.defenses.gradient_rounding import GradientRounding as GradientRounding
    from splitfed.defenses.iso import Iso as Iso
    from splitfed.defenses.label_dp import LabelDp as LabelDp
    from splitfed.defenses.laplace_release import LaplaceRelease as LaplaceRelease
    from splitfed.defenses.latent import Latent as Latent
    from splitfed.defenses.marvell import Marvell as Marvell
    from splitfed.defenses.max_norm import MaxNorm as MaxNorm
    from splitfed.defenses.mid import Mid as Mid
    from splitfed.defenses.mid_labels import MidLabels as MidLabels
    from splitfed.defenses.noise import Noise as Noise
    from splitfed.defenses.quantization import Quantization as Quantization
    from splitfed.defenses.shredder import Shredder as Shredder
    from splitfed.defenses.top_k import TopK as TopK

make_lazy(__name__)
