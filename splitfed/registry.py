"""Registry of algorithms, data sets and models: a table a kind, name -> "module:object", imported on first use.

Adding an algorithm takes its own file and one line here. Summary and paper are read from the head of its file
(first line, and the line that begins with "Paper:") without importing it.

Other packages add algorithms by entry points of the groups `splitfed.attacks`, `splitfed.defenses` and so on, one group
a table. They are added to the same tables, and are imported on first use like all others. For one that cannot be used
an error of one line is raised when it is loaded; one whose name is taken is left out with a warning.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import cache
from importlib.metadata import entry_points
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any, NamedTuple

from splitfed.core.errors import InvalidInput, check_names, describe_error
from splitfed.package_links import check_links

TABLES: dict[str, dict[str, str]] = {
    "topologies": {
        "vanilla": "splitfed.topologies.vanilla:vanilla",
        "u_shaped": "splitfed.topologies.u_shaped:u_shaped",
        "vertical": "splitfed.topologies.vertical:vertical",
        "extended_vanilla": "splitfed.topologies.extended_vanilla:extended_vanilla",
        "multi_task": "splitfed.topologies.multi_task:multi_task",
        "multi_hop": "splitfed.topologies.multi_hop:multi_hop",
        "local": "splitfed.topologies.local:local",
        "custom": "splitfed.topologies.custom:custom",
    },
    "schedules": {
        "sequential": "splitfed.schedules.sequential:Sequential",
        "alternate": "splitfed.schedules.alternate:Alternate",
        "splitfed_v1": "splitfed.schedules.splitfed_v1:SplitFedV1",
        "splitfed_v2": "splitfed.schedules.splitfed_v2:SplitFedV2",
        "splitfed_v3": "splitfed.schedules.splitfed_v3:SplitFedV3",
        "blind": "splitfed.schedules.blind:Blind",
        "local_loss": "splitfed.schedules.local_loss:LocalLoss",
        "sglr": "splitfed.schedules.sglr:Sglr",
        "joint": "splitfed.schedules.joint:Joint",
        "independent": "splitfed.schedules.independent:Independent",
    },
    "defenses": {
        "distance_correlation": "splitfed.defenses.distance_correlation:DistanceCorrelation",
        "dp_sgd": "splitfed.defenses.dp_sgd:DpSgd",
        "noise": "splitfed.defenses.noise:Noise",
        "gaussian_release": "splitfed.defenses.gaussian_release:GaussianRelease",
        "laplace_release": "splitfed.defenses.laplace_release:LaplaceRelease",
        "latent": "splitfed.defenses.latent:Latent",
        "marvell": "splitfed.defenses.marvell:Marvell",
        "max_norm": "splitfed.defenses.max_norm:MaxNorm",
        "iso": "splitfed.defenses.iso:Iso",
        "label_dp": "splitfed.defenses.label_dp:LabelDp",
        "gradient_compression": "splitfed.defenses.gradient_compression:GradientCompression",
        "gradient_rounding": "splitfed.defenses.gradient_rounding:GradientRounding",
        "channel_pruning": "splitfed.defenses.channel_pruning:ChannelPruning",
        "adversarial": "splitfed.defenses.adversarial:Adversarial",
        "mid": "splitfed.defenses.mid:Mid",
        "mid_labels": "splitfed.defenses.mid_labels:MidLabels",
        "shredder": "splitfed.defenses.shredder:Shredder",
        "dropout": "splitfed.defenses.dropout:Dropout",
        "quantization": "splitfed.defenses.quantization:Quantization",
        "top_k": "splitfed.defenses.top_k:TopK",
    },
    "attacks": {
        "inverse_network": "splitfed.attacks.reconstruction.inverse_network:InverseNetwork",
        "token_decoder": "splitfed.attacks.reconstruction.token_decoder:TokenDecoder",
        "rmle": "splitfed.attacks.reconstruction.rmle:Rmle",
        "latent_search": "splitfed.attacks.reconstruction.latent_search:LatentSearch",
        "query_inversion": "splitfed.attacks.reconstruction.query_inversion:QueryInversion",
        "lbfgs_inversion": "splitfed.attacks.reconstruction.lbfgs_inversion:LbfgsInversion",
        "dip": "splitfed.attacks.reconstruction.dip:Dip",
        "ladder": "splitfed.attacks.reconstruction.ladder:Ladder",
        "strongest": "splitfed.attacks.reconstruction.strongest:Strongest",
        "linear_inverse": "splitfed.attacks.reconstruction.linear_inverse:LinearInverse",
        "nearest": "splitfed.attacks.reconstruction.nearest:Nearest",
        "grn": "splitfed.attacks.reconstruction.grn:Grn",
        "shadow": "splitfed.attacks.reconstruction.shadow:Shadow",
        "unsplit": "splitfed.attacks.reconstruction.unsplit:Unsplit",
        "linear_gradient_inversion": (
            "splitfed.attacks.reconstruction.linear_gradient_inversion:LinearGradientInversion"
        ),
        "dlg": "splitfed.attacks.gradients.dlg:Dlg",
        "idlg": "splitfed.attacks.gradients.idlg:Idlg",
        "inverting_gradients": "splitfed.attacks.gradients.inverting_gradients:InvertingGradients",
        "fsha": "splitfed.attacks.training_time.fsha:Fsha",
        "sdar": "splitfed.attacks.training_time.sdar:Sdar",
        "pcat": "splitfed.attacks.training_time.pcat:Pcat",
        "insider_labels": "splitfed.attacks.training_time.insider_labels:InsiderLabels",
        "norm": "splitfed.attacks.labels.norm:Norm",
        "direction": "splitfed.attacks.labels.direction:Direction",
        "spectral": "splitfed.attacks.labels.spectral:Spectral",
        "direct_label": "splitfed.attacks.labels.direct_label:DirectLabel",
        "batch_label_inference": "splitfed.attacks.labels.batch_label_inference:BatchLabelInference",
        "unsplit_labels": "splitfed.attacks.labels.unsplit_labels:UnsplitLabels",
        "model_completion": "splitfed.attacks.labels.model_completion:ModelCompletion",
        "exploit": "splitfed.attacks.labels.exploit:Exploit",
        "similar": "splitfed.attacks.labels.similar:Similar",
        "gaussian_mixture": "splitfed.attacks.labels.gaussian_mixture:GaussianMixture",
        "own_features": "splitfed.attacks.labels.own_features:OwnFeatures",
        "co_training": "splitfed.attacks.labels.co_training:CoTraining",
        "strongest_labels": "splitfed.attacks.labels.strongest_labels:StrongestLabels",
        "membership_threshold": "splitfed.attacks.membership.membership_threshold:MembershipThreshold",
        "membership_shadow": "splitfed.attacks.membership.membership_shadow:MembershipShadow",
        "membership_releases": "splitfed.attacks.membership.membership_releases:MembershipReleases",
        "lira": "splitfed.attacks.membership.lira:Lira",
        "strongest_membership": "splitfed.attacks.membership.strongest_membership:StrongestMembership",
        "attribute": "splitfed.attacks.properties.attribute:Attribute",
        "model_inversion": "splitfed.attacks.reconstruction.model_inversion:ModelInversion",
        "class_shares": "splitfed.attacks.uploads.class_shares:ClassShares",
        "prototype_inversion": "splitfed.attacks.uploads.prototype_inversion:PrototypeInversion",
        "prototype_membership": "splitfed.attacks.uploads.prototype_membership:PrototypeMembership",
        "upload_membership": "splitfed.attacks.uploads.upload_membership:UploadMembership",
        "upload_lira": "splitfed.attacks.uploads.upload_lira:UploadLira",
        "upload_inversion": "splitfed.attacks.uploads.upload_inversion:UploadInversion",
        "update_shares": "splitfed.attacks.uploads.update_shares:UpdateShares",
    },
    "detectors": {
        "splitguard": "splitfed.detectors.splitguard:SplitGuard",
        "splitout": "splitfed.detectors.splitout:SplitOut",
    },
    "poisoning": {
        "label_flip": "splitfed.poisoning.label_flip:LabelFlip",
        "sign_flip": "splitfed.poisoning.sign_flip:SignFlip",
        "scaling": "splitfed.poisoning.scaling:Scaling",
        "byzantine_noise": "splitfed.poisoning.byzantine_noise:ByzantineNoise",
        "backdoor": "splitfed.poisoning.backdoor:Backdoor",
        "gradient_replacement": "splitfed.poisoning.gradient_replacement:GradientReplacement",
        "replay": "splitfed.poisoning.replay:Replay",
        "malicious_optimizer": "splitfed.poisoning.malicious_optimizer:MaliciousOptimizer",
    },
    "aggregation": {
        "mean": "splitfed.aggregation.mean:WeightedMean",
        "median": "splitfed.aggregation.median:Median",
        "trimmed_mean": "splitfed.aggregation.trimmed_mean:TrimmedMean",
        "krum": "splitfed.aggregation.krum:Krum",
        "geometric_median": "splitfed.aggregation.geometric_median:GeometricMedian",
    },
    "methods": {
        "standalone": "splitfed.federated.standalone:Standalone",
        "fedavg": "splitfed.federated.fedavg:FedAvg",
        "fedsgd": "splitfed.federated.fedsgd:FedSgd",
        "fedprox": "splitfed.federated.fedprox:FedProx",
        "scaffold": "splitfed.federated.scaffold:Scaffold",
        "fednova": "splitfed.federated.fednova:FedNova",
        "fedper": "splitfed.federated.fedper:FedPer",
        "lg_fedavg": "splitfed.federated.lg_fedavg:LgFedAvg",
        "ditto": "splitfed.federated.ditto:Ditto",
        "pfedme": "splitfed.federated.pfedme:PFedMe",
        "apfl": "splitfed.federated.apfl:Apfl",
        "per_fedavg": "splitfed.federated.per_fedavg:PerFedAvg",
        "ifca": "splitfed.federated.ifca:Ifca",
        "fedproto": "splitfed.federated.fedproto:FedProto",
        "fml": "splitfed.federated.fml:FML",
        "fedakt": "splitfed.federated.fedakt:FedAKT",
        "feddistill": "splitfed.federated.feddistill:FedDistill",
        "fedkd": "splitfed.federated.fedkd:FedKD",
        "fedgen": "splitfed.federated.fedgen:FedGen",
        "aggregation": "splitfed.federated.aggregation:Aggregation",
        "fedmd": "splitfed.federated.fedmd:FedMD",
        "mafml": "splitfed.federated.mafml:MAFML",
    },
    "data": {
        "digits": "splitfed.data.sources.digits:digits",
        "mnist5k": "splitfed.data.sources.mnist5k:mnist5k",
        "rotated_mnist": "splitfed.data.sources.rotated_mnist:rotated_mnist",
        "breast_cancer": "splitfed.data.sources.breast_cancer:breast_cancer",
        "markov_tokens": "splitfed.data.sources.markov_tokens:markov_tokens",
        "beats": "splitfed.data.sources.beats:beats",
        "synthetic": "splitfed.data.sources.synthetic:synthetic",
        "idx": "splitfed.data.sources.idx:idx",
        "cifar": "splitfed.data.sources.cifar:cifar",
        "npz": "splitfed.data.sources.npz:npz",
        "npy": "splitfed.data.sources.npy:npy",
        "parquet": "splitfed.data.sources.parquet:parquet",
        "image_folder": "splitfed.data.sources.image_folder:image_folder",
        "domain_folder": "splitfed.data.sources.domain_folder:domain_folder",
        "leaf": "splitfed.data.sources.leaf:leaf",
        "csv": "splitfed.data.sources.csv:csv",
    },
    "models": {
        "mlp": "splitfed.models.mlp:mlp",
        "lenet": "splitfed.models.lenet:lenet",
        "fedavg_cnn": "splitfed.models.fedavg_cnn:fedavg_cnn",
        "ecg_cnn": "splitfed.models.ecg_cnn:ecg_cnn",
        "resnet8": "splitfed.models.resnet8:resnet8",
        "resnet18": "splitfed.models.resnet18:resnet18",
        "resnet34": "splitfed.models.resnet34:resnet34",
        "alexnet": "splitfed.models.alexnet:alexnet",
        "vgg11": "splitfed.models.vgg11:vgg11",
        "transformers": "splitfed.models.transformers:transformers",
    },
}

EXTENSIONS: dict[str, dict[str, str]] = {
    "computations": {"encryption": "splitfed.encryption.settings:Encryption"},
    "secure_sums": {
        "masks": "splitfed.secure_sum.masked_sum:SecureSum",
        "ckks": "splitfed.encryption.secure_sum:EncryptedSum",
    },
    "listings": {"encryption": "splitfed.encryption.settings:describe_protocols"},
    "planned_batches": {"encryption": "splitfed.encryption.report:describe_batch"},
    "report_sections": {"encryption": "splitfed.encryption.report:report_section"},
}
"""Objects that one package provides to others, which refer to them by name: purpose -> name -> "module:object".

Secure computations of topologies, whose names are also the keys of their tables in a study; secure sums; what `splitfed
list` lists beside the tables above; descriptions of planned batches; further sections of a report.
"""

CONTRACTS = {
    "schedules": "splitfed.schedules.base:Schedule",
    "defenses": "splitfed.core.defense:Defense",
    "attacks": "splitfed.attacks.base:Attack",
    "detectors": "splitfed.detectors.base:Detector",
    "poisoning": "splitfed.poisoning.base:Poisoning",
    "aggregation": "splitfed.aggregation.base:AggregationRule",
    "methods": "splitfed.federated.base:Method",
}
"""Kind -> the base class of its plug-ins; topologies, data sets and models are made by functions."""

PLUGINS: dict[tuple[str, str], str] = {}
"""(kind, name) -> the distribution of a plug-in, with its version."""


class Listing(NamedTuple):
    """Name of an algorithm, and summary and paper from the docstring of its file."""

    name: str
    summary: str
    paper: str


def load(kind: str, name: str) -> Any:
    """Import and return the object registered as `name` among `kind`.

    Raises `InvalidInput`, with the nearest name, for an unknown one.
    """
    table = TABLES[kind]
    check_names(SINGULAR[kind], table, name)
    return _load_plugin(kind, name) if (kind, name) in PLUGINS else resolve(table[name])


def resolve(target: str) -> Any:
    """Import and return `target`, "module:object"."""
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _load_plugin(kind: str, name: str) -> Any:
    """Import and return a plug-in; raise `InvalidInput`, with its name and distribution, for one that is unusable."""
    described = f"{SINGULAR[kind]} {name!r} of {PLUGINS[kind, name]}"
    try:
        with redirect_stdout(sys.stderr):  # standard output may be read by a program
            found = resolve(TABLES[kind][name])
    except (Exception, SystemExit) as error:  # importing runs another package's code, which may raise anything
        reason = describe_error(error)
        raise InvalidInput(f"{described} cannot be imported from {TABLES[kind][name]!r} ({reason})") from error
    contract = resolve(CONTRACTS[kind]) if kind in CONTRACTS else None
    if contract is not None and not (isinstance(found, type) and issubclass(found, contract)):
        raise InvalidInput(f"{described} is {TABLES[kind][name]!r}; expected a subclass of {CONTRACTS[kind]}")
    if not callable(found):
        raise InvalidInput(f"{described} is {TABLES[kind][name]!r}; expected a function")
    return found


def is_foreign(kind: str, name: str) -> bool:
    """Return whether `name` among `kind` refers to code that is not part of splitfed: a user's own, or a plug-in."""
    return ":" in name or (kind, name) in PLUGINS


def name_of(kind: str, found: type) -> str:
    """Return the name under which the class `found` is registered among `kind`; its own name if it is not."""
    target = f"{found.__module__}:{found.__qualname__}"
    return next((name for name, where in TABLES[kind].items() if where == target), found.__name__)


@cache
def read_head(kind: str, name: str) -> Listing:
    """Read name, summary and paper from the file of `name`, without importing it."""
    try:
        with redirect_stdout(sys.stderr):
            lines = _docstring(kind, name).splitlines()
    except (Exception, SystemExit) as error:
        if (kind, name) not in PLUGINS:
            raise
        # To find a plug-in's file its package is imported, which may raise anything; others are still listed.
        return Listing(name, f"cannot be read ({describe_error(error)})", PLUGINS[kind, name])
    cited = dropwhile(lambda line: not line.startswith("Paper:"), lines)
    paper = " ".join(line.strip() for line in takewhile(str.strip, cited))
    summary = lines[0].rstrip(".") if lines else ""
    if (kind, name) in PLUGINS:
        summary = f"{summary} ({PLUGINS[kind, name]})"
    return Listing(name, summary, paper.removeprefix("Paper:").strip())


def _docstring(kind: str, name: str) -> str:
    file = module_file(TABLES[kind][name].partition(":")[0])
    if file is None or not file.is_file():
        check_links()
        raise ImportError(f"{kind}/{name} is registered, but its file is not installed")
    return ast.get_docstring(ast.parse(file.read_text("utf-8"))) or ""


SINGULAR = {
    "topologies": "topology",
    "schedules": "schedule",
    "defenses": "defense",
    "attacks": "attack",
    "detectors": "detector",
    "poisoning": "poisoning",
    "aggregation": "aggregation rule",
    "methods": "method",
    "data": "data set",
    "models": "model",
}


def module_file(module: str) -> Path | None:
    """Return the file of `module`, or None without one; a module of this package is found without importing it."""
    package, *path = module.split(".")
    if package == __package__:
        # Asking the import system would import the package that the file is in, and torch with it.
        return Path(__file__).parent.joinpath(*path).with_suffix(".py")
    spec = importlib.util.find_spec(module)
    return None if spec is None or spec.origin is None else Path(spec.origin)


def _find_plugins() -> Iterator[tuple[str, str, str, str]]:
    """Yield kind, name, "module:object" and distribution of every entry point of other packages."""
    found = entry_points()
    for kind in TABLES:
        for point in sorted(found.select(group=f"splitfed.{kind}"), key=lambda point: (point.name, point.value)):
            distribution = "an unknown package" if point.dist is None else f"{point.dist.name} {point.dist.version}"
            yield kind, point.name, point.value, distribution


def add_plugins() -> None:
    """Add the algorithms of other packages to the tables; called once, when this module is imported."""
    for kind, name, target, distribution in _find_plugins():
        if name not in TABLES[kind]:
            TABLES[kind][name] = target
            PLUGINS[kind, name] = distribution
        elif PLUGINS.get((kind, name)) != distribution:
            owner = PLUGINS.get((kind, name), "splitfed")
            line = f"{SINGULAR[kind]} {name!r} of {distribution} is left out: {owner} has one of that name"
            warnings.warn(line, UserWarning, stacklevel=3)


add_plugins()
