"""Federated methods: how clients learn from each other beside what the schedule does; one a file."""

from splitfed.federated.aggregation import Aggregation
from splitfed.federated.apfl import Apfl
from splitfed.federated.base import Learner, Method, MethodContext, ObjectivePlacement
from splitfed.federated.ditto import Ditto
from splitfed.federated.fedakt import FedAKT
from splitfed.federated.fedavg import FedAvg
from splitfed.federated.feddistill import FedDistill
from splitfed.federated.fedgen import FedGen
from splitfed.federated.fedkd import FedKD
from splitfed.federated.fedmd import FedMD
from splitfed.federated.fednova import FedNova
from splitfed.federated.fedper import FedPer
from splitfed.federated.fedproto import FedProto
from splitfed.federated.fedprox import FedProx
from splitfed.federated.fedsgd import FedSgd
from splitfed.federated.fml import FML
from splitfed.federated.ifca import Ifca
from splitfed.federated.lg_fedavg import LgFedAvg
from splitfed.federated.mafml import MAFML
from splitfed.federated.per_fedavg import PerFedAvg
from splitfed.federated.pfedme import PFedMe
from splitfed.federated.scaffold import Scaffold
from splitfed.federated.standalone import Standalone
from splitfed.federated.traits import MethodTraits

__all__ = [
    "FML",
    "MAFML",
    "Aggregation",
    "Apfl",
    "Ditto",
    "FedAKT",
    "FedAvg",
    "FedDistill",
    "FedGen",
    "FedKD",
    "FedMD",
    "FedNova",
    "FedPer",
    "FedProto",
    "FedProx",
    "FedSgd",
    "Ifca",
    "Learner",
    "LgFedAvg",
    "Method",
    "MethodContext",
    "MethodTraits",
    "ObjectivePlacement",
    "PFedMe",
    "PerFedAvg",
    "Scaffold",
    "Standalone",
]
