"""Attacks: what a curious party can infer from its view; one a file."""

from splitfed.attacks.base import Attack, Knowledge, Needs, Outcome
from splitfed.attacks.inverse_network import InverseNetwork
from splitfed.attacks.rmle import Rmle

__all__ = ["Attack", "InverseNetwork", "Knowledge", "Needs", "Outcome", "Rmle"]
