"""Old names of modules, classes, entries and keys: for one release they lead to the new ones, with a warning."""

from __future__ import annotations

from collections.abc import Mapping
from functools import wraps
from typing import Any

from splitfed.core.deprecation import warn

MOVED = {
    "splitfed.engines.link": "splitfed.core.messages",
    "splitfed.engines.message_link": "splitfed.core.messages",
    "splitfed.engines.mean": "splitfed.aggregation.running_mean",
    "splitfed.accounting": "splitfed.costs",
    "splitfed.accounting.audit": "splitfed.privacy.audit",
    "splitfed.accounting.bytes": "splitfed.costs.bytes",
    "splitfed.accounting.canaries": "splitfed.privacy.canaries",
    "splitfed.accounting.charging": "splitfed.privacy.charges",
    "splitfed.accounting.clock": "splitfed.costs.clock",
    "splitfed.accounting.crossover": "splitfed.costs.crossover",
    "splitfed.accounting.events": "splitfed.costs.events",
    "splitfed.accounting.flops": "splitfed.costs.flops",
    "splitfed.accounting.gdp_audit": "splitfed.privacy.gdp_audit",
    "splitfed.accounting.han": "splitfed.costs.han",
    "splitfed.accounting.ledger": "splitfed.privacy.ledger",
    "splitfed.accounting.measure": "splitfed.costs.measure",
    "splitfed.accounting.memory": "splitfed.costs.memory",
    "splitfed.accounting.mixing": "splitfed.privacy.row_mixing",
    "splitfed.accounting.plant": "splitfed.costs.queues",
    "splitfed.accounting.privacy": "splitfed.privacy.accountants",
    "splitfed.accounting.privacy_loss": "splitfed.privacy.accountant_pld",
    "splitfed.accounting.privacy_prv": "splitfed.privacy.accountant_prv",
    "splitfed.accounting.privacy_renyi": "splitfed.privacy.accountant_rdp",
    "splitfed.accounting.sglr": "splitfed.costs.sglr",
    "splitfed.accounting.singh": "splitfed.costs.singh",
    "splitfed.accounting.speeds": "splitfed.costs.speeds",
    "splitfed.accounting.splitfed_paper": "splitfed.costs.splitfed_paper",
    "splitfed.accounting.steps": "splitfed.costs.steps",
    "splitfed.aliasing": "splitfed.core.aliasing",
    "splitfed.architecture": "splitfed.threats.fresh_segments",
    "splitfed.attacks.assignment": "splitfed.attacks.scoring.assignment",
    "splitfed.attacks.attribute": "splitfed.attacks.properties.attribute",
    "splitfed.attacks.batch_label_inference": "splitfed.attacks.labels.batch_label_inference",
    "splitfed.attacks.class_metrics": "splitfed.attacks.scoring.class_metrics",
    "splitfed.attacks.class_shares": "splitfed.attacks.uploads.class_shares",
    "splitfed.attacks.classifier": "splitfed.attacks.scoring.classifier",
    "splitfed.attacks.confidence": "splitfed.attacks.membership.confidence",
    "splitfed.attacks.cut_gradients": "splitfed.attacks.labels.cut_gradients",
    "splitfed.attacks.decoder": "splitfed.attacks.reconstruction.decoder",
    "splitfed.attacks.direct_label": "splitfed.attacks.labels.direct_label",
    "splitfed.attacks.direction": "splitfed.attacks.labels.direction",
    "splitfed.attacks.dlg": "splitfed.attacks.gradients.dlg",
    "splitfed.attacks.fsha": "splitfed.attacks.training_time.fsha",
    "splitfed.attacks.fsha_networks": "splitfed.attacks.training_time.fsha_networks",
    "splitfed.attacks.gradient_matching": "splitfed.attacks.gradients.gradient_matching",
    "splitfed.attacks.gradient_ratio": "splitfed.attacks.training_time.gradient_ratio",
    "splitfed.attacks.grading": "splitfed.attacks.scoring.prediction_scores",
    "splitfed.attacks.grn": "splitfed.attacks.reconstruction.grn",
    "splitfed.attacks.hints": "splitfed.attacks.labels.known_labels",
    "splitfed.attacks.idlg": "splitfed.attacks.gradients.idlg",
    "splitfed.attacks.insider_labels": "splitfed.attacks.training_time.insider_labels",
    "splitfed.attacks.intruder": "splitfed.attacks.training_time.training_attack",
    "splitfed.attacks.inverse_network": "splitfed.attacks.reconstruction.inverse_network",
    "splitfed.attacks.inversion": "splitfed.attacks.reconstruction.inversion",
    "splitfed.attacks.inverting_gradients": "splitfed.attacks.gradients.inverting_gradients",
    "splitfed.attacks.label_metrics": "splitfed.attacks.scoring.label_metrics",
    "splitfed.attacks.ladder": "splitfed.attacks.reconstruction.ladder",
    "splitfed.attacks.lbfgs_search": "splitfed.attacks.gradients.lbfgs_search",
    "splitfed.attacks.least_squares": "splitfed.attacks.networks.least_squares",
    "splitfed.attacks.lira": "splitfed.attacks.membership.lira",
    "splitfed.attacks.local_training": "splitfed.attacks.gradients.local_training",
    "splitfed.attacks.member_metrics": "splitfed.attacks.scoring.member_metrics",
    "splitfed.attacks.membership_releases": "splitfed.attacks.membership.membership_releases",
    "splitfed.attacks.membership_shadow": "splitfed.attacks.membership.membership_shadow",
    "splitfed.attacks.membership_threshold": "splitfed.attacks.membership.membership_threshold",
    "splitfed.attacks.metrics": "splitfed.attacks.scoring.reconstruction_metrics",
    "splitfed.attacks.mixmatch": "splitfed.attacks.labels.mixmatch",
    "splitfed.attacks.model_completion": "splitfed.attacks.labels.model_completion",
    "splitfed.attacks.model_inversion": "splitfed.attacks.reconstruction.model_inversion",
    "splitfed.attacks.norm": "splitfed.attacks.labels.norm",
    "splitfed.attacks.own_steps": "splitfed.attacks.labels.own_steps",
    "splitfed.attacks.parts": "splitfed.attacks.networks.image_parts",
    "splitfed.attacks.pcat": "splitfed.attacks.training_time.pcat",
    "splitfed.attacks.priors": "splitfed.attacks.reconstruction.priors",
    "splitfed.attacks.prototype_inversion": "splitfed.attacks.uploads.prototype_inversion",
    "splitfed.attacks.prototype_membership": "splitfed.attacks.uploads.prototype_membership",
    "splitfed.attacks.replica": "splitfed.attacks.networks.frozen_copy",
    "splitfed.attacks.rmle": "splitfed.attacks.reconstruction.rmle",
    "splitfed.attacks.same_layout": "splitfed.attacks.networks.substitute_client",
    "splitfed.attacks.scaling": "splitfed.attacks.networks.scaling",
    "splitfed.attacks.sdar": "splitfed.attacks.training_time.sdar",
    "splitfed.attacks.sdar_networks": "splitfed.attacks.training_time.sdar_networks",
    "splitfed.attacks.shadow": "splitfed.attacks.reconstruction.shadow",
    "splitfed.attacks.share_metrics": "splitfed.attacks.scoring.share_metrics",
    "splitfed.attacks.sizes": "splitfed.attacks.networks.image_sizes",
    "splitfed.attacks.space": "splitfed.attacks.search_space",
    "splitfed.attacks.spectral": "splitfed.attacks.labels.spectral",
    "splitfed.attacks.student": "splitfed.attacks.training_time.task_loss",
    "splitfed.attacks.two_groups": "splitfed.attacks.labels.two_means",
    "splitfed.attacks.unowned": "splitfed.attacks.scoring.unknown_features",
    "splitfed.attacks.unsplit": "splitfed.attacks.reconstruction.unsplit",
    "splitfed.attacks.unsplit_labels": "splitfed.attacks.labels.unsplit_labels",
    "splitfed.backprop": "splitfed.core.party",
    "splitfed.belongings": "splitfed.core.party_state",
    "splitfed.checkpoint": "splitfed.training.checkpoint",
    "splitfed.chosen": "splitfed.core.per_client_defenses",
    "splitfed.courses": "splitfed.core.annealing",
    "splitfed.cutting": "splitfed.core.cutting",
    "splitfed.data.align": "splitfed.data.alignment.align",
    "splitfed.data.breast_cancer": "splitfed.data.sources.breast_cancer",
    "splitfed.data.cifar": "splitfed.data.sources.cifar",
    "splitfed.data.csv": "splitfed.data.sources.csv",
    "splitfed.data.digits": "splitfed.data.sources.digits",
    "splitfed.data.domain_folder": "splitfed.data.sources.domain_folder",
    "splitfed.data.files": "splitfed.data.sources.files",
    "splitfed.data.idx": "splitfed.data.sources.idx",
    "splitfed.data.image_folder": "splitfed.data.sources.image_folder",
    "splitfed.data.keyed_hash": "splitfed.data.alignment.keyed_hash",
    "splitfed.data.keys": "splitfed.data.alignment.keys",
    "splitfed.data.leaf": "splitfed.data.sources.leaf",
    "splitfed.data.mnist5k": "splitfed.data.sources.mnist5k",
    "splitfed.data.npz": "splitfed.data.sources.npz",
    "splitfed.data.order": "splitfed.data.batch_order",
    "splitfed.data.packaged": "splitfed.data.sources.packaged",
    "splitfed.data.pictures": "splitfed.data.sources.images",
    "splitfed.data.private_intersection": "splitfed.data.alignment.private_intersection",
    "splitfed.data.rotated_mnist": "splitfed.data.sources.rotated_mnist",
    "splitfed.data.strata": "splitfed.data.stratified",
    "splitfed.data.synthetic": "splitfed.data.sources.synthetic",
    "splitfed.data.table": "splitfed.data.alignment.table",
    "splitfed.defense": "splitfed.core.defense",
    "splitfed.defenses.aligned": "splitfed.defenses.aligned_noise",
    "splitfed.defenses.bits": "splitfed.defenses.binary_encoding",
    "splitfed.defenses.fitted": "splitfed.defenses.fitted_layers",
    "splitfed.defenses.packing": "splitfed.defenses.bit_packing",
    "splitfed.defenses.per_example": "splitfed.defenses.per_example_gradients",
    "splitfed.defenses.rowwise": "splitfed.defenses.row_gradients",
    "splitfed.defenses.similarity": "splitfed.defenses.ssim",
    "splitfed.defenses.variational": "splitfed.defenses.variational_encoder",
    "splitfed.dependence": "splitfed.stats.dependence",
    "splitfed.description": "splitfed.training.description",
    "splitfed.digests": "splitfed.core.digests",
    "splitfed.downstream": "splitfed.threats.fresh_segments",
    "splitfed.draw": "splitfed.drawing.svg",
    "splitfed.duty": "splitfed.core.step_plan",
    "splitfed.engines.fusion": "splitfed.aggregation.base",
    "splitfed.engines.lending": "splitfed.engines.borrowed_weights",
    "splitfed.engines.moving": "splitfed.engines.local",
    "splitfed.engines.placing": "splitfed.engines.parties",
    "splitfed.engines.residents": "splitfed.engines.observers",
    "splitfed.engines.summing": "splitfed.engines.secure_summation",
    "splitfed.engines.taking": "splitfed.engines.participation",
    "splitfed.equivalence": "splitfed.core.equivalence",
    "splitfed.equivalence_sides": "splitfed.core.equivalence_sides",
    "splitfed.errors": "splitfed.core.errors",
    "splitfed.executor": "splitfed.core.executor",
    "splitfed.extractor": "splitfed.threats.segment_runner",
    "splitfed.failures": "splitfed.study.run.failures",
    "splitfed.federated.bordered": "splitfed.federated.base_head",
    "splitfed.federated.distilling": "splitfed.federated.distillation",
    "splitfed.federated.doubled": "splitfed.federated.dual_model",
    "splitfed.federated.generating": "splitfed.federated.generator",
    "splitfed.federated.mirrors": "splitfed.federated.model_copy",
    "splitfed.federated.places": "splitfed.federated.topology_values",
    "splitfed.federated.sharing": "splitfed.federated.shared_weights",
    "splitfed.federated.showing": "splitfed.federated.public_rows",
    "splitfed.federated.stepping": "splitfed.federated.sgd_reach",
    "splitfed.federated.tutors": "splitfed.federated.objectives",
    "splitfed.fingerprint": "splitfed.training.fingerprint",
    "splitfed.finite": "splitfed.core.executor",
    "splitfed.folder": "splitfed.training.folder",
    "splitfed.fusions": "splitfed.aggregation",
    "splitfed.fusions.geometric_median": "splitfed.aggregation.geometric_median",
    "splitfed.fusions.krum": "splitfed.aggregation.krum",
    "splitfed.fusions.mean": "splitfed.aggregation.mean",
    "splitfed.fusions.median": "splitfed.aggregation.median",
    "splitfed.fusions.trimmed_mean": "splitfed.aggregation.trimmed_mean",
    "splitfed.gaussian_mechanism": "splitfed.privacy.gaussian_mechanism",
    "splitfed.granting": "splitfed.threats.knowledge",
    "splitfed.graph": "splitfed.core.topology",
    "splitfed.idling": "splitfed.threats.dry_run",
    "splitfed.imitated_defenses": "splitfed.threats.imitated_defenses",
    "splitfed.initial_weights": "splitfed.core.initial_weights",
    "splitfed.inquiry": "splitfed.threats.evaluator",
    "splitfed.insiders": "splitfed.threats.training_time",
    "splitfed.intervals": "splitfed.stats.intervals",
    "splitfed.layout": "splitfed.drawing.layout",
    "splitfed.learning": "splitfed.training.local_learner",
    "splitfed.manipulations": "splitfed.poisoning",
    "splitfed.manipulations.backdoor": "splitfed.poisoning.backdoor",
    "splitfed.manipulations.base": "splitfed.poisoning.base",
    "splitfed.manipulations.byzantine_noise": "splitfed.poisoning.byzantine_noise",
    "splitfed.manipulations.effect": "splitfed.poisoning.effect",
    "splitfed.manipulations.entering": "splitfed.poisoning.injection",
    "splitfed.manipulations.gradient_replacement": "splitfed.poisoning.gradient_replacement",
    "splitfed.manipulations.label_flip": "splitfed.poisoning.label_flip",
    "splitfed.manipulations.malicious_optimizer": "splitfed.poisoning.malicious_optimizer",
    "splitfed.manipulations.replay": "splitfed.poisoning.replay",
    "splitfed.manipulations.scaling": "splitfed.poisoning.scaling",
    "splitfed.manipulations.sign_flip": "splitfed.poisoning.sign_flip",
    "splitfed.model_snapshot": "splitfed.core.model_snapshot",
    "splitfed.optim": "splitfed.core.optimizers",
    "splitfed.own_segments": "splitfed.threats.segment_runner",
    "splitfed.party": "splitfed.core.party",
    "splitfed.payload": "splitfed.core.payload",
    "splitfed.planning.dry": "splitfed.planning.counting",
    "splitfed.planning.meeting": "splitfed.planning.method_clock",
    "splitfed.planning.playing": "splitfed.planning.simulation",
    "splitfed.planning.settling": "splitfed.planning.calibration",
    "splitfed.planning.summing": "splitfed.planning.weight_flows",
    "splitfed.preparation": "splitfed.planning.validation",
    "splitfed.probe": "splitfed.core.probe",
    "splitfed.records": "splitfed.training.client_scores",
    "splitfed.reordered_gradients": "splitfed.core.reordered_gradients",
    "splitfed.rerun": "splitfed.threats.retraining",
    "splitfed.rounds": "splitfed.planning.rounds",
    "splitfed.row_independence": "splitfed.core.row_independence",
    "splitfed.run": "splitfed.training.run",
    "splitfed.schedules.apart": "splitfed.schedules.independent",
    "splitfed.schedules.fusing": "splitfed.aggregation.lookup",
    "splitfed.schedules.handing": "splitfed.schedules.segment_handover",
    "splitfed.schedules.together": "splitfed.schedules.joint_step",
    "splitfed.secure": "splitfed.secure_sum",
    "splitfed.secure.flows": "splitfed.secure_sum.plan",
    "splitfed.secure_sum.flows": "splitfed.secure_sum.plan",
    "splitfed.secure.keys": "splitfed.secure_sum.keys",
    "splitfed.secure.member": "splitfed.secure_sum.member",
    "splitfed.secure.plan": "splitfed.secure_sum.plan",
    "splitfed.secure.server": "splitfed.secure_sum.server",
    "splitfed.secure.shamir": "splitfed.secure_sum.shamir",
    "splitfed.seeding": "splitfed.core.random",
    "splitfed.source": "splitfed.training.code_digest",
    "splitfed.study.again": "splitfed.study.run.reattack",
    "splitfed.study.assemble": "splitfed.study.config.assembly",
    "splitfed.study.audit": "splitfed.study.run.audit",
    "splitfed.study.audit_game": "splitfed.study.run.audit_game",
    "splitfed.study.audit_labels": "splitfed.study.run.audit_labels",
    "splitfed.study.audit_releases": "splitfed.study.run.audit_releases",
    "splitfed.study.audit_steps": "splitfed.study.run.audit_steps",
    "splitfed.study.build": "splitfed.study.config.build",
    "splitfed.study.cell": "splitfed.study.config.cell",
    "splitfed.study.contained": "splitfed.study.report.contained",
    "splitfed.study.costs": "splitfed.study.report.planned_costs",
    "splitfed.study.depth": "splitfed.study.report.topology_data",
    "splitfed.study.divide": "splitfed.study.config.data_table",
    "splitfed.study.figures": "splitfed.study.report.figures.plots",
    "splitfed.study.figures_clients": "splitfed.study.report.figures.rounds",
    "splitfed.study.figures_costs": "splitfed.study.report.figures.costs",
    "splitfed.study.figures_depth": "splitfed.study.report.figures.depth",
    "splitfed.study.figures_federated": "splitfed.study.report.figures.federated",
    "splitfed.study.figures_images": "splitfed.study.report.figures.images",
    "splitfed.study.figures_inside": "splitfed.study.report.figures.rounds",
    "splitfed.study.figures_leaks": "splitfed.study.report.figures.leakage",
    "splitfed.study.figures_private": "splitfed.study.report.figures.rounds",
    "splitfed.study.figures_strength": "splitfed.study.report.figures.strength",
    "splitfed.study.figures_style": "splitfed.study.report.figures.style",
    "splitfed.study.grid": "splitfed.study.config.grid",
    "splitfed.study.guards": "splitfed.study.config.algorithm_tables",
    "splitfed.study.holdings": "splitfed.study.report.exposure",
    "splitfed.study.inline_svg": "splitfed.study.report.inline_svg",
    "splitfed.study.intruding": "splitfed.study.config.training_attacks",
    "splitfed.study.lookup": "splitfed.study.config.lookup",
    "splitfed.study.methods": "splitfed.study.config.algorithm_tables",
    "splitfed.study.mistakes": "splitfed.study.config.mistakes",
    "splitfed.study.pace": "splitfed.study.config.training_table",
    "splitfed.study.parameters": "splitfed.study.config.parameters",
    "splitfed.study.pieces": "splitfed.study.config.piece_tables",
    "splitfed.study.plain_text": "splitfed.study.report.data",
    "splitfed.study.plan_table": "splitfed.study.report.plan_table",
    "splitfed.study.plans": "splitfed.study.config.training_table",
    "splitfed.study.predicting": "splitfed.study.run.prediction",
    "splitfed.study.private": "splitfed.study.report.privacy",
    "splitfed.study.progress": "splitfed.study.run.progress",
    "splitfed.study.rehearsal": "splitfed.study.run.preflight",
    "splitfed.study.remarks": "splitfed.study.report.remarks",
    "splitfed.study.report_clients": "splitfed.study.report.summary",
    "splitfed.study.report_costs": "splitfed.study.report.costs",
    "splitfed.study.report_data": "splitfed.study.report.data",
    "splitfed.study.report_leaks": "splitfed.study.report.page",
    "splitfed.study.report_names": "splitfed.study.report.summary",
    "splitfed.study.report_page": "splitfed.study.report.page",
    "splitfed.study.report_pareto": "splitfed.study.report.summary",
    "splitfed.study.report_sees": "splitfed.study.report.exposure",
    "splitfed.study.report_shared": "splitfed.study.report.figures.federated",
    "splitfed.study.report_summary": "splitfed.study.report.summary",
    "splitfed.study.report_text": "splitfed.study.report.text",
    "splitfed.study.rows": "splitfed.study.run.input_rows",
    "splitfed.study.runner": "splitfed.study.run.runner",
    "splitfed.study.session": "splitfed.study.run.session",
    "splitfed.study.store": "splitfed.study.run.store",
    "splitfed.study.table": "splitfed.study.run.results_table",
    "splitfed.study.toml": "splitfed.study.config.toml",
    "splitfed.study.topology_data": "splitfed.study.report.topology_data",
    "splitfed.study.trials": "splitfed.study.run.trials",
    "splitfed.study.trust": "splitfed.study.run.trust",
    "splitfed.study.units": "splitfed.study.report.units",
    "splitfed.study.user_key": "splitfed.study.run.user_key",
    "splitfed.tape": "splitfed.core.step_state",
    "splitfed.task": "splitfed.core.tasks",
    "splitfed.traffic": "splitfed.core.traffic",
    "splitfed.tuning": "splitfed.threats.tuning",
    "splitfed.tutoring": "splitfed.core.local_objective",
    "splitfed.uploading": "splitfed.core.upload_defenses",
    "splitfed.uploads": "splitfed.threats.upload_attacks",
    "splitfed.upstream": "splitfed.threats.segment_runner",
    "splitfed.uses": "splitfed.core.usage_counts",
    "splitfed.utility": "splitfed.stats.utility",
    "splitfed.view": "splitfed.core.messages",
    "splitfed.watching": "splitfed.training.detectors",
}
"""Old module -> new module."""

RENAMED = {
    "splitfed.attacks.base": {
        "Found": "PredictionAndClone",
        "GuessAndClone": "PredictionAndClone",
        "Inside": "TrainedAttack",
    },
    "splitfed.attacks.grading": {"grade_clone": "score_clone", "grade_of": "score_prediction"},
    "splitfed.data.labels": {"Target": "LabelSet"},
    "splitfed.defenses.mid_labels": {"Sampled": "SampledBottleneck"},
    "splitfed.defenses.sum_kl": {"Noise": "NoiseVariances"},
    "splitfed.detectors.base": {"Desk": "DetectorSite", "Rehearsal": "LocalTrainer", "Watchman": "DetectorState"},
    "splitfed.federated.base": {"Seat": "ObjectivePlacement"},
    "splitfed.federated.fedakt": {"Pair": "FeatureMatching"},
    "splitfed.federated.ifca": {"Choice": "ClusterChoice"},
    "splitfed.federated.mafml": {"Mutual": "MafmlObjective"},
    "splitfed.registry": {"Head": "Listing"},
    "splitfed.accounting.audit": {"Found": "LowerBound"},
    "splitfed.accounting.canaries": {"Seat": "CanaryParty"},
    "splitfed.accounting.events": {"Run": "ReplicaWork"},
    "splitfed.accounting.han": {"Setting": "HanSetting"},
    "splitfed.accounting.steps": {"Task": "WorkItem"},
    "splitfed.attacks.class_metrics": {"Labelled": "LabelledRows"},
    "splitfed.attacks.fsha_networks": {"Decoder": "FshaDecoder", "ImageCritic": "FshaCritic"},
    "splitfed.attacks.gradient_matching": {"Client": "ClientGradient"},
    "splitfed.attacks.grn": {"Rows": "VictimRows"},
    "splitfed.attacks.intruder": {"Insider": "TrainingAttackState", "Intruder": "TrainingAttack", "Post": "AttackSite"},
    "splitfed.attacks.networks": {"Labelled": "LabelChannel"},
    "splitfed.attacks.replica": {"Replica": "FrozenCopy"},
    "splitfed.attacks.sdar_networks": {"Decoder": "SdarDecoder", "ImageCritic": "SdarCritic"},
    "splitfed.belongings": {"Belongings": "PartyState"},
    "splitfed.checkpoint": {"Found": "NewestCheckpoint"},
    "splitfed.defense": {
        "Holder": "PrivatizedParty",
        "Place": "DefenseSite",
        "Shield": "GradientPrivatizer",
        "Slope": "PenaltyGradient",
    },
    "splitfed.defenses.per_example": {"Rows": "RowGradients"},
    "splitfed.duty": {"Duty": "SegmentPlan", "Guard": "EdgeDefense"},
    "splitfed.engines.fusion": {"Fusion": "AggregationRule"},
    "splitfed.engines.moving": {"Moving": "LocalEngine"},
    "splitfed.engines.placing": {"Crew": "RunParties"},
    "splitfed.engines.residents": {"Inside": "AttackObserver", "Resident": "Observer", "Sentry": "DetectorObserver"},
    "splitfed.engines.taking": {"Taking": "Participation"},
    "splitfed.executor": {"Lane": "ClientReplica"},
    "splitfed.federated.distilling": {"Mutual": "MutualDistillation"},
    "splitfed.federated.generating": {"Head": "ClientHead"},
    "splitfed.federated.showing": {"Holder": "PublicRowsObjective"},
    "splitfed.federated.tutors": {"Quiet": "NoObjective"},
    "splitfed.inquiry": {"Inquiry": "Evaluator"},
    "splitfed.layout": {"Plan": "DrawingLayout"},
    "splitfed.manipulations.base": {"Manipulation": "Poisoning"},
    "splitfed.planning.dry": {"Dry": "CountingTrainer", "DryLearner": "CountingLearner"},
    "splitfed.rounds": {"Guided": "MethodTrainer"},
    "splitfed.schedules.apart": {"Apart": "Independent"},
    "splitfed.schedules.handing": {"Handing": "SegmentHandover"},
    "splitfed.schedules.together": {"Together": "JointStep"},
    "splitfed.study.cell": {"Plan": "TrainingPlan"},
    "splitfed.study.config": {"Table": "StrictTable"},
    "splitfed.study.figures_depth": {"Line": "DepthLine"},
    "splitfed.study.pieces": {"Point": "GridPoint"},
    "splitfed.study.report_data": {"Measure": "StrengthMeasure"},
    "splitfed.tape": {"Tape": "StepState"},
    "splitfed.tutoring": {"Tutor": "LocalObjective"},
    "splitfed.uses": {"Uses": "UsageCounts"},
}
"""Old module -> its old names of classes -> the new ones."""

KINDS = {"fusions": "aggregation", "manipulations": "poisoning"}
"""Old kind of the registry -> the new one."""

ENTRIES = {"schedules": {"apart": "independent"}}
"""Kind of the registry -> old name of an entry -> the new one."""

PARAMETERS = {"attacks": {"preset": "budget"}, "schedules": {"fusion": "aggregation"}}
"""Kind of the registry -> old parameter of its entries -> the new one."""

KEYS = {
    "intruder": "training_attack",
    "intruders": "training_attacks",
    "asked": "training_attack_scores",
    "ask": "evaluate_every",
    "manipulations": "poisoning",
    "guess": "prediction",
}
"""Old key of a run's description, of its result and of the entries of its history -> the new one."""

_REPRS = {"Apart(": "Independent(", "fusion=": "aggregation="}

_PACKAGES = {
    "splitfed.attacks.knowledge": "splitfed.attacks.base",
    "splitfed.attacks.local_models": "splitfed.attacks.base",
    "splitfed.attacks.threat_model": "splitfed.attacks.base",
    "splitfed.attacks.training_time.attack_site": "splitfed.attacks.intruder",
    "splitfed.attacks.networks.networks": "splitfed.attacks.networks",
    "splitfed.attacks.uploads.upload_attack": "splitfed.attacks.uploads",
    "splitfed.core.privacy_events": "splitfed.privacy",
    "splitfed.data.alignment.report": "splitfed.data.alignment",
    "splitfed.training.entry_point": "splitfed.training",
}
_FIRST = {new: old for old, new in MOVED.items()} | _PACKAGES


def first_name(module: str, name: str) -> str:
    """Return the first dotted name of a class or function: what folders of runs call it, wherever it is now."""
    old = _FIRST.get(module, module)
    return f"{old}.{next((was for was, now in RENAMED.get(old, {}).items() if now == name), name)}"


def first_field(module: str, name: str) -> str:
    """Return what the field `name` of a class in `module` was called in the first release."""
    old = PARAMETERS.get(module.removeprefix("splitfed.").partition(".")[0], {})
    return next((was for was, now in old.items() if now == name), name)


def current_kind(kind: str) -> str:
    """Return the name of a `kind` of the registry, and warn of an old one."""
    if kind in KINDS:
        warn(f"kind {kind!r} is now {KINDS[kind]!r}", 3)
    return KINDS.get(kind, kind)


def current_entry(kind: str, name: str) -> str:
    """Return the name of an entry among `kind` of the registry, and warn of an old one."""
    new = ENTRIES.get(kind, {}).get(name, name)
    if new != name:
        warn(f"{kind} {name!r} is now {new!r}", 3)
    return new


def current_parameters(kind: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters of an entry among `kind` of the registry by their names of now, and warn of old ones."""
    moved = PARAMETERS.get(kind, {})
    for old in [name for name in given if name in moved]:
        warn(f"{old}=... of {kind} is now {moved[old]}=...", 3)
    return {moved.get(name, name): value for name, value in given.items()}


def current_keys(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an earlier version may have written of a run, or of a round, by the keys of now; nothing is said."""
    renamed = {KEYS.get(key, key): value for key, value in found.items()}
    if "history" in renamed:
        renamed["history"] = [current_keys(entry) for entry in renamed["history"]]
    if "attacks" in renamed:
        renamed["attacks"] = [current_attack(entry) for entry in renamed["attacks"]]
    if "training_attack_scores" in renamed:
        renamed["training_attack_scores"] = _current_scores(renamed["training_attack_scores"])
    if isinstance(renamed.get("training_attack"), str):
        renamed["training_attack"] = renamed["training_attack"].replace("(preset=", "(budget=")
    return renamed


def current_attack(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an earlier version may have written of an attack on a run, by the keys of now."""
    label = entry["label"].replace("(preset=", "(budget=")
    return {**entry, "scores": _current_scores(entry["scores"]), "label": label}


def _current_scores(scores: Any) -> Any:
    """Return scores, who is scored -> value at some depth, with the attack's own under their name of now."""
    if not isinstance(scores, Mapping):
        return scores
    return {"attack" if key == "guess" else key: _current_scores(value) for key, value in scores.items()}


def current_description(described: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description of a run that an earlier version may have written, by the names of now."""
    found = current_keys(described)
    for old, new in _REPRS.items():
        if isinstance(found.get("schedule"), str):
            found["schedule"] = found["schedule"].replace(old, new)
    code = found.get("code", {})
    for old, new in (("the intruder at ", "the training attack at "), ("the manipulation ", "the poisoning ")):
        code = {new + key.removeprefix(old) if key.startswith(old) else key: value for key, value in code.items()}
    return {**found, "code": code}


def accept_old_parameters(kind: type, registered: str) -> None:
    """Let a class that is `registered` among a kind of the registry go on taking parameters under their old names."""
    init = kind.__init__  # type: ignore[misc]

    @wraps(init)
    def with_new_names(self: Any, *args: Any, **given: Any) -> None:
        init(self, *args, **current_parameters(registered, given))

    kind.__init__ = with_new_names  # type: ignore[misc]
