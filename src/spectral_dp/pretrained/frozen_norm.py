"""BatchNorm with statistics that never change: an affine map of each channel, whose scale and shift can be trained.

    x^ = (x - running mean) / sqrt(running variance + eps)      per channel, the same for all samples

The statistics are those that were published with the weights. A sample does not meet the others of its batch, so
per-sample gradients exist, and the network computes what it computed when it was published.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from spectral_dp.gradients import register_rule
from spectral_dp.gradients.rules.normalization import NormalisationRule


class FrozenBatchNorm2d(nn.BatchNorm2d):
    """BatchNorm that stays in evaluation mode, whatever ``train()`` says."""

    def train(self, mode: bool = True) -> FrozenBatchNorm2d:
        """Stays in evaluation mode."""
        return super().train(False)

    @classmethod
    def of(cls, norm: nn.BatchNorm2d) -> FrozenBatchNorm2d:
        """Returns a layer with the parameters, which are shared, and the statistics of another one."""
        frozen = cls(norm.num_features, norm.eps, norm.momentum, norm.affine)
        frozen._parameters, frozen._buffers = norm._parameters, norm._buffers
        return frozen.train()


@register_rule(FrozenBatchNorm2d, parameters=["weight", "bias"])
class FrozenBatchNormRule(NormalisationRule):
    """Rule of BatchNorm with fixed statistics."""

    def _normalised(self, x: Tensor) -> Tensor:
        norm: nn.BatchNorm2d = self.module  # type: ignore[assignment]
        mean, variance = norm.running_mean, norm.running_var
        assert mean is not None
        assert variance is not None
        return F.batch_norm(x, mean.to(x.dtype), variance.to(x.dtype), eps=norm.eps)
