"""splitfed: a laboratory for split learning and privacy.

Cut a PyTorch model into segments, place them on parties, train as those parties really would, defend what crosses,
attack what was seen. Everything here is imported on first use, so that `import splitfed` costs nothing.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from splitfed.core.lazy_package import show
from splitfed.package_links import LinkedPackages

if TYPE_CHECKING:
    from splitfed import (
        aggregation,
        attacks,
        costs,
        data,
        defenses,
        detectors,
        federated,
        matching,
        models,
        poisoning,
        schedules,
        topologies,
    )
    from splitfed.attacks.base import Attack, Knowledge, Needs
    from splitfed.core import annealing
    from splitfed.core.cut_places import CutPlace, cut_places
    from splitfed.core.cutting import cut
    from splitfed.core.defense import (
        Accounted,
        Calibrated,
        Codec,
        Defense,
        GradientDefense,
        LabelDefense,
        LayerDefense,
        LearnedDefense,
        PenaltyDefense,
        ReceiverPenaltyDefense,
        ReleaseDefense,
        TaskWeightDefense,
        WeightDefense,
    )
    from splitfed.core.defense_context import Context
    from splitfed.core.errors import InvalidInput, NonFinite, SplitfedError
    from splitfed.core.local_update import LocalUpdate
    from splitfed.core.messages import Message, Recording, View
    from splitfed.core.model_loss import model_task
    from splitfed.core.optimizers import Optim
    from splitfed.core.parameter_groups import ParameterGroup
    from splitfed.core.tasks import Task, binary, classification, regression
    from splitfed.core.topology import Edge, Head, Segment, Topology
    from splitfed.costs.speeds import Machine, Speeds
    from splitfed.data.dataset import Dataset
    from splitfed.data.federation import Federation
    from splitfed.stats import dependence
    from splitfed.study.run.audit import audit_run as audit
    from splitfed.study.run.compare import compare
    from splitfed.study.run.loading import load
    from splitfed.study.run.python_study import PreparedStudy, StudyResults, load_study
    from splitfed.study.run.python_study import build_study as study
    from splitfed.study.run.search_session import SearchSession
    from splitfed.training.callbacks import Callback
    from splitfed.training.early_stopping import EarlyStopping
    from splitfed.training.entry_point import train
    from splitfed.training.progress_bar import ProgressBar
    from splitfed.training.run import AttackResult, Run
    from splitfed.training.settings import Adversaries, Evaluation, Logging
    from splitfed.training.writers import CsvWriter, TensorBoardWriter, WandbWriter

__version__ = "0.1.0"

_MODULES = {
    "aggregation": "aggregation",
    "annealing": "core.annealing",
    "attacks": "attacks",
    "costs": "costs",
    "data": "data",
    "defenses": "defenses",
    "dependence": "stats.dependence",
    "detectors": "detectors",
    "federated": "federated",
    "matching": "matching",
    "models": "models",
    "poisoning": "poisoning",
    "schedules": "schedules",
    # Called, it builds one: see `splitfed/study/__init__.py`.
    "study": "study",
    "topologies": "topologies",
}
_NAMES = {
    "Accounted": "core.defense",
    "Adversaries": "training.settings",
    "Attack": "attacks.base",
    "AttackResult": "training.run",
    "Calibrated": "core.defense",
    "Callback": "training.callbacks",
    "Codec": "core.defense",
    "Context": "core.defense_context",
    "CsvWriter": "training.writers",
    "CutPlace": "core.cut_places",
    "Dataset": "data.dataset",
    "Defense": "core.defense",
    "EarlyStopping": "training.early_stopping",
    "Edge": "core.topology",
    "Encryption": "core.encryption_settings",
    "Evaluation": "training.settings",
    "Federation": "data.federation",
    "GradientDefense": "core.defense",
    "Head": "core.topology",
    "InvalidInput": "core.errors",
    "Knowledge": "attacks.base",
    "LabelDefense": "core.defense",
    "LayerDefense": "core.defense",
    "LearnedDefense": "core.defense",
    "LocalUpdate": "schedules.base",
    "Logging": "training.settings",
    "Machine": "costs.speeds",
    "Message": "core.messages",
    "Needs": "attacks.base",
    "NonFinite": "core.errors",
    "Optim": "core.optimizers",
    "ParameterGroup": "core.parameter_groups",
    "PenaltyDefense": "core.defense",
    "PreparedStudy": "study.run.python_study",
    "SearchSession": "study.run.search_session",
    "ProgressBar": "training.progress_bar",
    "ReceiverPenaltyDefense": "core.defense",
    "Recording": "core.messages",
    "ReleaseDefense": "core.defense",
    "Run": "training.run",
    "Segment": "core.topology",
    "Speeds": "costs.speeds",
    "SplitfedError": "core.errors",
    "StudyResults": "study.run.python_study",
    "Task": "core.tasks",
    "TaskWeightDefense": "core.defense",
    "TensorBoardWriter": "training.writers",
    "Topology": "core.topology",
    "View": "core.messages",
    "WandbWriter": "training.writers",
    "WeightDefense": "core.defense",
    "audit": "study.run.audit",
    "binary": "core.tasks",
    "classification": "core.tasks",
    "compare": "study.run.compare",
    "cut": "core.cutting",
    "cut_places": "core.cut_places",
    "load": "study.run.loading",
    "load_study": "study.run.python_study",
    "model_task": "core.model_loss",
    "predict": "training.inference",
    "regression": "core.tasks",
    "train": "training.entry_point",
}
_CALLED = {"audit": "audit_run"}
"""Name -> how its own module calls it."""

__all__ = [
    "Accounted",
    "Adversaries",
    "Attack",
    "AttackResult",
    "Calibrated",
    "Callback",
    "Codec",
    "Context",
    "CsvWriter",
    "CutPlace",
    "Dataset",
    "Defense",
    "EarlyStopping",
    "Edge",
    "Encryption",
    "Evaluation",
    "Federation",
    "GradientDefense",
    "Head",
    "InvalidInput",
    "Knowledge",
    "LabelDefense",
    "LayerDefense",
    "LearnedDefense",
    "LocalUpdate",
    "Logging",
    "Machine",
    "Message",
    "Needs",
    "NonFinite",
    "Optim",
    "ParameterGroup",
    "PenaltyDefense",
    "PreparedStudy",
    "ProgressBar",
    "ReceiverPenaltyDefense",
    "Recording",
    "ReleaseDefense",
    "Run",
    "SearchSession",
    "Segment",
    "Speeds",
    "SplitfedError",
    "StudyResults",
    "Task",
    "TaskWeightDefense",
    "TensorBoardWriter",
    "Topology",
    "View",
    "WandbWriter",
    "WeightDefense",
    "aggregation",
    "annealing",
    "attacks",
    "audit",
    "binary",
    "classification",
    "compare",
    "costs",
    "cut",
    "cut_places",
    "data",
    "defenses",
    "dependence",
    "detectors",
    "federated",
    "load",
    "load_study",
    "matching",
    "model_task",
    "models",
    "poisoning",
    "predict",
    "regression",
    "schedules",
    "study",
    "topologies",
    "train",
]

# First: another checkout, installed for development, would lend its own packages without a word.
sys.meta_path.insert(0, LinkedPackages())


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"splitfed.{_MODULES[name]}")
    if name in _NAMES:
        value = show("splitfed", getattr(import_module(f"splitfed.{_NAMES[name]}"), _CALLED.get(name, name)))
        # Found once, it is found without this function from now on.
        globals()[name] = value
        return value
    raise AttributeError(f"module 'splitfed' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
