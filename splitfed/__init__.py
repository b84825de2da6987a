"""splitfed: a laboratory for split learning and privacy.

Cut a PyTorch model into segments, assign them to parties, train as those parties would, defend the messages between
them, and attack what each party received. Everything here is imported on first use, so `import splitfed` is fast.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from splitfed.core.lazy_package import make_lazy
from splitfed.package_links import LinkedPackages

if TYPE_CHECKING:
    from splitfed import (
        aggregation as aggregation,
        attacks as attacks,
        costs as costs,
        data as data,
        defenses as defenses,
        detectors as detectors,
        federated as federated,
        matching as matching,
        models as models,
        poisoning as poisoning,
        schedules as schedules,
        topologies as topologies,
    )
    from splitfed.attacks.base import Attack as Attack, Knowledge as Knowledge, Needs as Needs
    from splitfed.core import annealing as annealing
    from splitfed.core.cut_places import CutPlace as CutPlace, cut_places as cut_places
    from splitfed.core.cutting import cut as cut
    from splitfed.core.defense import (
        Accounted as Accounted,
        Calibrated as Calibrated,
        Codec as Codec,
        Defense as Defense,
        GradientDefense as GradientDefense,
        LabelDefense as LabelDefense,
        LayerDefense as LayerDefense,
        LearnedDefense as LearnedDefense,
        PenaltyDefense as PenaltyDefense,
        ReceiverPenaltyDefense as ReceiverPenaltyDefense,
        ReleaseDefense as ReleaseDefense,
        TaskWeightDefense as TaskWeightDefense,
        WeightDefense as WeightDefense,
    )
    from splitfed.core.defense_context import Context as Context
    from splitfed.core.errors import (
        InvalidInput as InvalidInput,
        NonFinite as NonFinite,
        SplitfedError as SplitfedError,
    )
    from splitfed.core.local_update import LocalUpdate as LocalUpdate
    from splitfed.core.messages import Message as Message, Recording as Recording, View as View
    from splitfed.core.model_loss import model_task as model_task
    from splitfed.core.optimizers import Optim as Optim
    from splitfed.core.parameter_groups import ParameterGroup as ParameterGroup
    from splitfed.core.tasks import (
        Task as Task,
        binary as binary,
        classification as classification,
        regression as regression,
    )
    from splitfed.core.topology import Edge as Edge, Head as Head, Segment as Segment, Topology as Topology
    from splitfed.costs.speeds import Machine as Machine, Speeds as Speeds
    from splitfed.data.dataset import Dataset as Dataset, Federation as Federation
    from splitfed.encryption.settings import Encryption as Encryption
    from splitfed.stats import dependence as dependence
    from splitfed.study.run.audit import audit as audit
    from splitfed.study.run.compare import compare as compare
    from splitfed.study.run.loading import load as load
    from splitfed.study.run.python_study import (
        PreparedStudy as PreparedStudy,
        StudyResults as StudyResults,
        load_study as load_study,
        study as study,
    )
    from splitfed.study.run.search_session import SearchSession as SearchSession
    from splitfed.threats.attack_result import AttackResult as AttackResult
    from splitfed.training.callbacks import Callback as Callback
    from splitfed.training.early_stopping import EarlyStopping as EarlyStopping
    from splitfed.training.entry_point import train as train
    from splitfed.training.inference import predict as predict
    from splitfed.training.progress_bar import ProgressBar as ProgressBar
    from splitfed.training.run import Run as Run
    from splitfed.training.settings import Adversaries as Adversaries, Evaluation as Evaluation, Logging as Logging
    from splitfed.training.writers import (
        CsvWriter as CsvWriter,
        TensorBoardWriter as TensorBoardWriter,
        WandbWriter as WandbWriter,
    )

__version__ = "0.1.0"

# First in the list: another checkout, installed for development, would otherwise provide its own packages.
sys.meta_path.insert(0, LinkedPackages())
# Called, the package builds a study: see `splitfed/study/__init__.py`.
make_lazy(__name__, {"study": ("splitfed", "study")})
