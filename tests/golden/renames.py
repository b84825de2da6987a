"""Names of the registry that have been renamed since the commit that golden runs are compared with.

`kind=old` -> `kind=new`, with the kinds that cases use, say "method=fedper": "method=fed_per". Cases and parts of the
old commit are read under the new names. A line is of use until the rename is in the commit that is compared with.
Attacks draw by their registered name, so a renamed attack moves: what it reconstructs has to be looked at otherwise.
"""

from __future__ import annotations

RENAMES: dict[str, str] = {"schedule=apart": "schedule=independent"}

KEYS: dict[str, str] = {
    "training_attacks": "intruders",
    "training_attack_scores": "asked",
    "attack": "guess",
    "all releases at the cut": "each release at the cut",
}
"""Key of a history -> what the commit that golden runs are compared with called it; hashes are those of the latter."""
