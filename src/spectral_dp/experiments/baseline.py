"""Which runs a result is compared with: DP-SGD on the same data, features and network, at the same epsilon."""

from __future__ import annotations

from collections.abc import Sequence

from spectral_dp.experiments.comparison import SAME_DATA, paired_difference
from spectral_dp.experiments.results import Group

#: What must be the same for accuracies to be set side by side.
_SAME = (*SAME_DATA, "features", "feature_options", "model", "relation")
#: Budgets count as the same if they differ by less than this; Opacus rounds sample rates, and all calibrate.
_CLOSE = 0.02


def beside_dpsgd(group: Group, groups: Sequence[Group]) -> str:
    """Returns the accuracy of DP-SGD at the epsilon of a private group, and the difference over the seeds of both.

    Empty where the groups hold no such DP-SGD (ours, or else that of Opacus), and for DP-SGD itself.
    """
    if group.first.settings.method == "dpsgd" or not group.first.settings.is_private:
        return ""
    found = [other for name in ("dpsgd", "opacus") for other in groups if _is_baseline(other, name, group)]
    if not found:
        return ""
    theirs = {run.settings.seed: run.last["heldout_accuracy"] for run in found[0].runs if run.rows}
    ours = {run.settings.seed: run.last["heldout_accuracy"] for run in group.runs if run.rows}
    seeds = sorted(theirs.keys() & ours.keys())
    difference = ""
    if seeds:
        paired = paired_difference([ours[seed] for seed in seeds], [theirs[seed] for seed in seeds])
        difference = f"; difference {paired}"
    return f"{found[0].accuracy_text()} %{difference}"


def _is_baseline(other: Group, method: str, group: Group) -> bool:
    theirs, ours = other.first.settings, group.first.settings
    if other is group or theirs.method != method or not (other.first.is_finished and group.first.is_finished):
        return False
    spent = [each.largest("epsilon") for each in (other, group)]
    if spent[0] is None or spent[1] is None or abs(spent[0] - spent[1]) > _CLOSE * max(spent[0], spent[1]):
        return False
    return all(getattr(theirs, name) == getattr(ours, name) for name in _SAME)
