"""What parameters of attacks must be: a value outside is refused before anything runs, in one line that says so."""

from __future__ import annotations

from typing import Any

import pytest

from splitfed.registry import load
from tests.examples import refusal

REFUSED: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("inverse_network", {"epochs": 0}, "inverse_network epochs=0 is not allowed; expected a whole number"),
    ("inverse_network", {"batch_size": 0}, "inverse_network batch_size=0 is not allowed"),
    ("inverse_network", {"width": -1}, "inverse_network width=-1 is not allowed"),
    ("inverse_network", {"queries": 0}, "inverse_network queries=0 is not allowed"),
    ("inverse_network", {"lr": 0.0}, "inverse_network lr=0.0 is not allowed; expected a number in (0, inf)"),
    ("rmle", {"iterations": 0}, "rmle iterations=0 is not allowed"),
    ("rmle", {"lr": -1.0}, "rmle lr=-1.0 is not allowed"),
    ("rmle", {"tv": -0.1}, "rmle tv=-0.1 is not allowed; expected a number in [0, inf)"),
    ("rmle", {"l2": float("nan")}, "rmle l2=nan is not allowed"),
    ("ladder", {"widths": ()}, "ladder widths=() is not allowed; expected one whole number or more"),
    ("ladder", {"epochs": (5, 0)}, "ladder epochs=0 is not allowed; expected a whole number of at least 1"),
    ("ladder", {"batch_size": 0}, "ladder batch_size=0 is not allowed"),
    ("ladder", {"queries": 0}, "ladder queries=0 is not allowed"),
    ("ladder", {"lr": 0.0}, "ladder lr=0.0 is not allowed; expected a number in (0, inf)"),
    ("ladder", {"validation": 1.0}, "ladder validation=1.0 is not allowed; expected a number in (0, 1)"),
    (
        "linear_inverse",
        {"queries": 0},
        "linear_inverse queries=0 is not allowed; expected a whole number of at least 1",
    ),
    ("nearest", {"queries": 0}, "nearest queries=0 is not allowed; expected a whole number of at least 1"),
    ("nearest", {"neighbours": ()}, "nearest neighbours=() is not allowed; expected one count or more"),
    ("nearest", {"neighbours": (1, 0)}, "nearest neighbours=0 is not allowed; expected a whole number of at least 1"),
    ("grn", {"epochs": 0}, "grn epochs=0 is not allowed; expected a whole number of at least 1"),
    ("grn", {"batch_size": 1}, "grn batch_size=1 is not allowed; expected a whole number of at least 2"),
    ("grn", {"lr": 0.0}, "grn lr=0.0 is not allowed; expected a number in (0, inf)"),
    ("grn", {"variance": -1.0}, "grn variance=-1.0 is not allowed; expected a number in [0, inf)"),
    ("shadow", {"epochs": 0}, "shadow epochs=0 is not allowed; expected a whole number of at least 1"),
    ("shadow", {"batch_size": 0}, "shadow batch_size=0 is not allowed"),
    ("shadow", {"iterations": 0}, "shadow iterations=0 is not allowed"),
    ("shadow", {"shadow_lr": 0}, "shadow shadow_lr=0 is not allowed; expected a number in (0, inf)"),
    ("shadow", {"lr": 0}, "shadow lr=0 is not allowed"),
    ("shadow", {"tv": -1}, "shadow tv=-1 is not allowed; expected a number in [0, inf)"),
    ("shadow", {"l2": -1}, "shadow l2=-1 is not allowed"),
    ("unsplit", {"rounds": 0}, "unsplit rounds=0 is not allowed; expected a whole number of at least 1"),
    ("unsplit", {"input_steps": 0}, "unsplit input_steps=0 is not allowed"),
    ("unsplit", {"model_steps": 0}, "unsplit model_steps=0 is not allowed"),
    ("unsplit", {"restarts": 0}, "unsplit restarts=0 is not allowed"),
    ("unsplit", {"lr": 0}, "unsplit lr=0 is not allowed; expected a number in (0, inf)"),
    ("unsplit", {"model_lr": 0}, "unsplit model_lr=0 is not allowed"),
    ("unsplit", {"tv": -1}, "unsplit tv=-1 is not allowed; expected a number in [0,"),
    ("unsplit", {"l2": -1}, "unsplit l2=-1 is not allowed; expected a number in [0,"),
    ("unsplit", {"stretch": 0}, "unsplit stretch=0 is not allowed; expected true or false"),
    ("linear_gradient_inversion", {"step_rows": -1}, "linear_gradient_inversion step_rows=-1 is not allowed"),
    ("model_inversion", {"iterations": 0}, "model_inversion iterations=0 is not allowed"),
    ("model_inversion", {"patience": 0}, "model_inversion patience=0 is not allowed"),
    ("model_inversion", {"lr": 0.0}, "model_inversion lr=0.0 is not allowed; expected a number in (0, inf)"),
    ("model_inversion", {"tv": -1.0}, "model_inversion tv=-1.0 is not allowed; expected a number in [0, inf)"),
    ("model_inversion", {"enough": 1.5}, "model_inversion enough=1.5 is not allowed; expected a number in (0, 1]"),
    ("model_inversion", {"optimizer": "adm"}, "unknown optimizer of model_inversion 'adm'; did you mean"),
    ("dlg", {"iterations": 0}, "dlg iterations=0 is not allowed"),
    ("dlg", {"restarts": 0}, "dlg restarts=0 is not allowed"),
    ("idlg", {"iterations": 0}, "idlg iterations=0 is not allowed"),
    ("idlg", {"restarts": -1}, "idlg restarts=-1 is not allowed"),
    ("inverting_gradients", {"lr": 0.0}, "inverting_gradients lr=0.0 is not allowed"),
    ("inverting_gradients", {"tv": -1.0}, "inverting_gradients tv=-1.0 is not allowed"),
    ("inverting_gradients", {"iterations": 0}, "inverting_gradients iterations=0 is not allowed"),
    ("inverting_gradients", {"restarts": 0}, "inverting_gradients restarts=0 is not allowed"),
    ("fsha", {"lr": 0.0}, "fsha lr=0.0"),
    ("fsha", {"penalty": -1.0}, "fsha penalty=-1.0"),
    ("fsha", {"width": 0}, "fsha width=0"),
    ("fsha", {"disguise": 1.0}, "fsha disguise=1.0 is not allowed; expected a number in (1, inf)"),
    ("fsha", {"momentum": 1.0}, "fsha momentum=1.0"),
    ("pcat", {"lr": 0.0}, "pcat lr=0.0"),
    ("pcat", {"start": -1}, "pcat start=-1"),
    ("pcat", {"after": 0}, "pcat after=0"),
    ("pcat", {"layout": "clients"}, "unknown pcat layout 'clients'; did you mean 'client'"),
    ("sdar", {"lr": 0.0}, "sdar lr=0.0"),
    ("sdar", {"l1": -1.0}, "sdar l1=-1.0"),
    ("sdar", {"flip": 1.5}, "sdar flip=1.5"),
    ("sdar", {"layout": "clients"}, "unknown sdar layout 'clients'; did you mean 'client'"),
    ("sdar", {"normalise": 1}, "sdar normalise=1 is not allowed; expected true or false"),
    ("direction", {"hints": 0}, "direction hints=0 is not allowed; expected a whole number of at"),
    ("spectral", {"rows": "gradient"}, "unknown spectral rows 'gradient'; did you mean 'gradients'"),
    ("batch_label_inference", {"iterations": 0}, "batch_label_inference iterations=0"),
    ("batch_label_inference", {"batch_size": 0}, "batch_label_inference batch_size=0"),
    ("batch_label_inference", {"lr": 0.0}, "batch_label_inference lr=0.0 is not allowed"),
    ("unsplit_labels", {"iterations": 0}, "unsplit_labels iterations=0"),
    ("unsplit_labels", {"hints": 0}, "unsplit_labels hints=0"),
    ("unsplit_labels", {"lr": -1.0}, "unsplit_labels lr=-1.0"),
    ("model_completion", {"labelled": 0}, "model_completion labelled=0 is not allowed"),
    ("model_completion", {"iterations": 0}, "model_completion iterations=0 is not allowed"),
    ("model_completion", {"batch_size": 1}, "model_completion batch_size=1 is not allowed"),
    ("model_completion", {"lr": 0.0}, "model_completion lr=0.0 is not allowed"),
    ("model_completion", {"temperature": 0.0}, "model_completion temperature=0.0 is not allowed"),
    ("model_completion", {"alpha": -1.0}, "model_completion alpha=-1.0 is not allowed"),
    ("model_completion", {"weight": -1.0}, "model_completion weight=-1.0 is not allowed"),
    ("model_completion", {"decay": 1.0}, "model_completion decay=1.0 is not allowed"),
    ("membership_threshold", {"queries": 0}, "membership_threshold queries=0 is not allowed"),
    ("membership_shadow", {"copies": 0}, "membership_shadow copies=0 is not allowed; expected a whole number"),
    ("membership_releases", {"epochs": 0}, "membership_releases epochs=0 is not allowed"),
    ("membership_releases", {"lr": 0.0}, "membership_releases lr=0.0 is not allowed"),
    ("lira", {"copies": 5}, "lira copies=5 is not allowed; expected an even number: half hold each row"),
    ("lira", {"copies": 2}, "lira copies=2 is not allowed; expected a whole number of at least 4"),
    ("lira", {"batch_size": 0}, "lira batch_size=0 is not allowed"),
    ("attribute", {"epochs": 0}, "attribute epochs=0 is not allowed; expected a whole number"),
    ("attribute", {"width": 0}, "attribute width=0 is not allowed"),
    ("attribute", {"queries": 0}, "attribute queries=0 is not allowed"),
    ("attribute", {"lr": -1.0}, "attribute lr=-1.0 is not allowed; expected a number in (0, inf)"),
    ("prototype_inversion", {"iterations": 0}, "prototype_inversion iterations=0"),
    ("prototype_inversion", {"neighbours": 0}, "prototype_inversion neighbours=0"),
    ("prototype_inversion", {"lr": 0.0}, "prototype_inversion lr=0"),
    ("prototype_inversion", {"stay": -1.0}, "prototype_inversion stay=-1"),
)


@pytest.mark.parametrize(("name", "changes", "text"), REFUSED, ids=lambda v: v if isinstance(v, str) else str(v))
def test_values_out_of_range_are_refused(name: str, changes: dict[str, Any], text: str) -> None:
    assert refusal(load("attacks", name), **changes).startswith(text)


def test_none_stays_a_value_where_it_is_the_default() -> None:
    assert load("attacks", "lira")(epochs=None).epochs is None
    assert load("attacks", "fsha")(disguise=None).disguise is None
    assert refusal(load("attacks", "lira"), copies=None).startswith("lira copies=None is not allowed")
