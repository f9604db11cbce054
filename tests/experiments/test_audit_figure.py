"""The picture of an audit."""

import pytest
from tests.support import audit_doubles as doubles

from spectral_dp import audit
from spectral_dp.experiments.audit_figure import draw_audit


@pytest.mark.parametrize("relation", ["add_or_remove_one", "replace_one"])
def test_picture(relation, tmp_path):
    effort = audit.Effort(1, canary_blocks=2, per_block=4, scores=200, run_scores=1, steps=1, noise_steps=4, calls=40)
    claim = audit.Claim(1.3, 0.7, 4, sample_rate=0.5, relation=relation)
    report = audit.run_audit(doubles.target(doubles.sound, claim=claim), effort=effort, seed=0)
    draw_audit(report, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
