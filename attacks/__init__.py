"""Attacks: what a curious party can infer from its view; one a file."""

from splitfed.attacks.attribute import Attribute
from splitfed.attacks.base import Attack, Knowledge, Needs, Outcome, Phase, Target
from splitfed.attacks.batch_label_inference import BatchLabelInference
from splitfed.attacks.direct_label import DirectLabel
from splitfed.attacks.direction import Direction
from splitfed.attacks.dlg import Dlg
from splitfed.attacks.fsha import Fsha
from splitfed.attacks.grn import Grn
from splitfed.attacks.idlg import Idlg
from splitfed.attacks.insider_labels import InsiderLabels
from splitfed.attacks.inverse_network import InverseNetwork
from splitfed.attacks.inverting_gradients import InvertingGradients
from splitfed.attacks.ladder import Ladder
from splitfed.attacks.lira import Lira
from splitfed.attacks.membership_releases import MembershipReleases
from splitfed.attacks.membership_shadow import MembershipShadow
from splitfed.attacks.membership_threshold import MembershipThreshold
from splitfed.attacks.model_completion import ModelCompletion
from splitfed.attacks.model_inversion import ModelInversion
from splitfed.attacks.norm import Norm
from splitfed.attacks.pcat import Pcat
from splitfed.attacks.rmle import Rmle
from splitfed.attacks.sdar import Sdar
from splitfed.attacks.shadow import Shadow
from splitfed.attacks.spectral import Spectral
from splitfed.attacks.unsplit import Unsplit
from splitfed.attacks.unsplit_labels import UnsplitLabels

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
