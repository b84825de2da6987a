"""Attacks: what a curious party can infer from its view; one a file."""

from splitfed.attacks.base import Attack, Knowledge, Needs, Outcome, Phase, Target
from splitfed.attacks.gradients.dlg import Dlg
from splitfed.attacks.gradients.idlg import Idlg
from splitfed.attacks.gradients.inverting_gradients import InvertingGradients
from splitfed.attacks.labels.batch_label_inference import BatchLabelInference
from splitfed.attacks.labels.direct_label import DirectLabel
from splitfed.attacks.labels.direction import Direction
from splitfed.attacks.labels.model_completion import ModelCompletion
from splitfed.attacks.labels.norm import Norm
from splitfed.attacks.labels.spectral import Spectral
from splitfed.attacks.labels.unsplit_labels import UnsplitLabels
from splitfed.attacks.membership.lira import Lira
from splitfed.attacks.membership.membership_releases import MembershipReleases
from splitfed.attacks.membership.membership_shadow import MembershipShadow
from splitfed.attacks.membership.membership_threshold import MembershipThreshold
from splitfed.attacks.properties.attribute import Attribute
from splitfed.attacks.reconstruction.grn import Grn
from splitfed.attacks.reconstruction.inverse_network import InverseNetwork
from splitfed.attacks.reconstruction.ladder import Ladder
from splitfed.attacks.reconstruction.model_inversion import ModelInversion
from splitfed.attacks.reconstruction.rmle import Rmle
from splitfed.attacks.reconstruction.shadow import Shadow
from splitfed.attacks.reconstruction.unsplit import Unsplit
from splitfed.attacks.training_time.fsha import Fsha
from splitfed.attacks.training_time.insider_labels import InsiderLabels
from splitfed.attacks.training_time.pcat import Pcat
from splitfed.attacks.training_time.sdar import Sdar

__all__ = [
    "Attack",
    "Attribute",
    "BatchLabelInference",
    "DirectLabel",
    "Direction",
    "Dlg",
    "Fsha",
    "Grn",
    "Idlg",
    "InsiderLabels",
    "InverseNetwork",
    "InvertingGradients",
    "Knowledge",
    "Ladder",
    "Lira",
    "MembershipReleases",
    "MembershipShadow",
    "MembershipThreshold",
    "ModelCompletion",
    "ModelInversion",
    "Needs",
    "Norm",
    "Outcome",
    "Pcat",
    "Phase",
    "Rmle",
    "Sdar",
    "Shadow",
    "Spectral",
    "Target",
    "Unsplit",
    "UnsplitLabels",
]
