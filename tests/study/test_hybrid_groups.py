"""The study of hybrids in groups of parties, small, from table to report: what one method grants, another does not."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from splitfed.core.errors import InvalidInput
from splitfed.study.run.python_study import load_study
from tests.study.examples import checked, write
from tests.study.search_examples import run

STUDY = Path(__file__).parents[2] / "examples" / "hybrid_groups.toml"


def hybrids(**changes: Any) -> dict[str, Any]:
    """Return the study in small: one seed, few rounds, and two attacks that cost next to nothing."""
    study = tomllib.loads(STUDY.read_text("utf-8"))
    study["study"] |= {"seeds": [0], **changes}
    study["training"] |= {"rounds": 3, "batch_size": 16}
    study["attack"] = [{"name": "linear_inverse"}, {"name": "class_shares"}]
    study["defense"] = [{"name": "none"}]
    return study


def test_an_attack_that_some_methods_grant_leaves_out_none_of_the_others(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"class_shares: ClassShares .* clients of FML send weights"):
        checked(hybrids(skip_refused=False))
    assert run(write(tmp_path, hybrids()), tmp_path / "out") == 0
    found = {result.method.partition("(")[0]: result for result in load_study(tmp_path / "out").results}
    assert {name: len(one.attacks) for name, one in found.items()} == {"none": 1, "fedproto": 2, "fml": 1}
    assert all(result.utility.test > 0.7 for result in found.values()), "the more frequent class has .63"
    (one,) = found["fml"].refused
    assert one["why"].endswith("clients of FML send weights")
    page = (tmp_path / "out" / "report.html").read_text("utf-8")
    section = page.partition('<section class="warning" id="not-granted">')[2].partition("</section>")[0]
    assert len(re.findall(r"<li>class_shares.*, 1 of 3 runs: ", section)) == 2


def test_an_attack_and_a_party_that_no_run_has_are_refused_all_the_same() -> None:
    study = hybrids()
    study["method"] = [{"name": "none"}, {"name": "fml"}]
    with pytest.raises(InvalidInput, match=r"class_shares: ClassShares .* clients of FML send weights"):
        checked(study)
    with pytest.raises(InvalidInput, match=r"training\.record\.parties: unknown party to record 'fed_sever'"):
        checked(hybrids() | {"training": {**hybrids()["training"], "record": {"parties": ["fed_sever"]}}})
