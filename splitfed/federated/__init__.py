"""Federated methods: what clients exchange in addition to the schedule; one method a file, imported on first use."""

from typing import TYPE_CHECKING

from splitfed.core.lazy_package import make_lazy

if TYPE_CHECKING:
    from splitfed.federated.aggregation import Aggregation as Aggregation
    from splitfed.federated.apfl import Apfl as Apfl
    from splitfed.federated.base import (
        Method as Method,
        MethodContext as MethodContext,
        ObjectivePlacement as ObjectivePlacement,
    )
    from splitfed.federated.ditto import Ditto as Ditto
    from splitfed.federated.fedakt import FedAKT as FedAKT
    from splitfed.federated.fedavg import FedAvg as FedAvg
    from splitfed.federated.feddistill import FedDistill as FedDistill
    from splitfed.federated.fedgen import FedGen as FedGen
    from splitfed.federated.fedkd import FedKD as FedKD
    from splitfed.federated.fedmd import FedMD as FedMD
    from splitfed.federated.fednova import FedNova as FedNova
    from splitfed.federated.fedper import FedPer as FedPer
    from splitfed.federated.fedproto import FedProto as FedProto
    from splitfed.federated.fedprox import FedProx as FedProx
    from splitfed.federated.fedsgd import FedSgd as FedSgd
    from splitfed.federated.fml import FML as FML
    from splitfed.federated.ifca import Ifca as Ifca
    from splitfed.federated.learner import (
        Learner as Learner,
        LearnerData as LearnerData,
        LearnerIdentity as LearnerIdentity,
        LearnerMessages as LearnerMessages,
        LearnerOutputs as LearnerOutputs,
        LearnerTraining as LearnerTraining,
        LearnerWeights as LearnerWeights,
    )
    from splitfed.federated.lg_fedavg import LgFedAvg as LgFedAvg
    from splitfed.federated.mafml import MAFML as MAFML
    from splitfed.federated.per_fedavg import PerFedAvg as PerFedAvg
    from splitfed.federated.pfedme import PFedMe as PFedMe
    from splitfed.federated.scaffold import Scaffold as Scaffold
    from splitfed.federated.standalone import Standalone as Standalone
    from splitfed.federated.traits import MethodTraits as MethodTraits

make_lazy(__name__)
