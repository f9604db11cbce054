"""Functions of one's own as targets: the protocol is checked, and noise out of reach is noticed."""

import pytest
import torch

from spectral_dp import audit


class TestFunctions:
    @pytest.mark.parametrize(
        ("function", "message"),
        [
            (lambda g: g, r"shape \(4,\), got \(2, 4\)"),
            (lambda g: g.sum(0).tolist(), "must return a torch.Tensor, got list"),
            (lambda g: g.sum(0).long(), "floating-point numbers, got torch.int64"),
            (lambda g: g.sum(0) + missing, "failed on 2 gradients of length 4: NameError"),  # noqa: F821
        ],
    )
    def test_the_protocol_is_checked(self, function, message):
        target = audit.FunctionTarget(function, audit.Claim(1.0), dimension=4)
        with pytest.raises((TypeError, ValueError), match=message):
            target.release([target.null()] * 2)

    def test_means_are_turned_into_sums(self):
        claim = audit.Claim(1.0, expected_batch_size=5)
        for returns, divisor in (("mean", 5), ("sum", 1)):
            target = audit.FunctionTarget(lambda g, d=divisor: g.sum(0) / d, claim, dimension=2, returns=returns)
            assert target.release([torch.ones(2), torch.ones(2)]).tolist() == pytest.approx([2, 2])

    def test_noise_out_of_reach_is_noticed(self):
        import numpy as np

        source = np.random.default_rng(0)

        def release(gradients):
            total = torch.nn.functional.normalize(gradients.nan_to_num(0), dim=1).sum(0)
            return total + torch.from_numpy(source.normal(size=8)).float()

        target = audit.FunctionTarget(release, audit.Claim(1.0, sample_rate=0.2, steps=5), dimension=8, returns="sum")
        assert not target.controls_noise
        effort = audit.Effort(
            2, canary_blocks=2, per_block=8, scores=400, run_scores=50, steps=5, noise_steps=20, calls=40
        )
        report = audit.run_audit(target, effort=effort, confidence=0.999, seed=0)
        assert report.ok, report.violations
        left_out = {v.audit for v in report.verdicts if v.ok is None}
        assert left_out == {"linear map", "neighbours", "batch size", "neighbours, over a run", "sampling"}

    @pytest.mark.parametrize(
        ("path", "message"),
        [
            ("nothing", "FILE.py:callable"),
            ("absent.py:release", "there is no file absent.py"),
            ("{}:other", "AttributeError"),
            ("{}:number", "is a int, not a function"),
        ],
    )
    def test_loading(self, path, message, tmp_path):
        file = tmp_path / "mine.py"
        file.write_text("number = 1\ndef release(g):\n    return g.sum(0)\n")
        assert audit.load_function(f"{file}:release")(torch.ones(2, 3)).tolist() == [2, 2, 2]
        with pytest.raises(ValueError, match=message):
            audit.load_function(path.format(file))
