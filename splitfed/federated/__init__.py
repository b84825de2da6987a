"""Federated methods: how clients learn from each other beside what the schedule does; imported on first use."""

from typing import TYPE_CHECKING

from splitfed.core.lazy_package import make_lazy

if TYPE_CHECKING:
    from splitfed.federated.aggregation import Aggregation
    from splitfed.federated.apfl import Apfl
    from splitfed.federated.base import Method, MethodContext, ObjectivePlacement
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
    from splitfed.federated.learner import (
        Learner,
        LearnerData,
        LearnerIdentity,
        LearnerMessages,
        LearnerOutputs,
        LearnerTraining,
        LearnerWeights,
    )
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
    "LearnerData",
    "LearnerIdentity",
    "LearnerMessages",
    "LearnerOutputs",
    "LearnerTraining",
    "LearnerWeights",
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

make_lazy(
    __name__,
    {
        "Aggregation": "aggregation",
        "Apfl": "apfl",
        "Learner": "learner",
        "LearnerData": "learner",
        "LearnerIdentity": "learner",
        "LearnerMessages": "learner",
        "LearnerOutputs": "learner",
        "LearnerTraining": "learner",
        "LearnerWeights": "learner",
        "Method": "base",
        "MethodContext": "base",
        "ObjectivePlacement": "base",
        "Ditto": "ditto",
        "FedAKT": "fedakt",
        "FedAvg": "fedavg",
        "FedDistill": "feddistill",
        "FedGen": "fedgen",
        "FedKD": "fedkd",
        "FedMD": "fedmd",
        "FedNova": "fednova",
        "FedPer": "fedper",
        "FedProto": "fedproto",
        "FedProx": "fedprox",
        "FedSgd": "fedsgd",
        "FML": "fml",
        "Ifca": "ifca",
        "LgFedAvg": "lg_fedavg",
        "MAFML": "mafml",
        "PerFedAvg": "per_fedavg",
        "PFedMe": "pfedme",
        "Scaffold": "scaffold",
        "Standalone": "standalone",
        "MethodTraits": "traits",
    },
)
