"""LoRA (Hu et al. 2022): a frozen dense layer and a trained product of two narrow ones beside it.

    y = W x + b + (α / r) B A x        A: r x in, random;  B: out x r, zero at first

With B at zero the network begins as it was published. Privately there are r (in + out) numbers to noise rather than
in x out.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor, nn


class LowRankLinear(nn.Module):
    """A frozen dense layer with a trained addition of low rank.

    Args:
        linear: The dense layer, which is frozen.
        rank: ``r``, the rank of the addition.
        alpha: ``α``; the addition is scaled by ``α / r``.
    """

    def __init__(self, linear: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        if not 1 <= rank <= min(linear.in_features, linear.out_features):
            raise ValueError(
                f"the rank is from 1 to {min(linear.in_features, linear.out_features)} for a layer of "
                f"{linear.in_features} x {linear.out_features}, got {rank}"
            )
        self.base, self.scale = linear.requires_grad_(False), alpha / rank
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """``(..., in) -> (..., out)``."""
        return self.base(x) + self.scale * self.up(self.down(x))


def add_low_rank(
    network: nn.Module, names: Collection[str] = ("query", "value"), *, rank: int = 8, alpha: float = 16.0
) -> nn.Module:
    """Gives dense layers of a network a trained addition of low rank, in place, and returns the network.

    What else is trained stays as it is: freeze the network first, as :func:`~spectral_dp.pretrained.train_only` does.

    Args:
        network: The network.
        names: The last parts of the names of the layers, such as ``"query"``.
        rank: The rank of the additions.
        alpha: Scale of the additions, relative to their rank.

    Raises:
        ValueError: No dense layer has such a name.
    """
    found = 0
    for module in list(network.modules()):
        for name, child in module._modules.items():
            if name in names and isinstance(child, nn.Linear):
                module._modules[name] = LowRankLinear(child, rank, alpha)
                found += 1
    if not found:
        dense = sorted({n.rpartition(".")[2] for n, m in network.named_modules() if isinstance(m, nn.Linear)})
        raise ValueError(f"no dense layer is called {', '.join(names)}: choose from {', '.join(dense)}")
    return network
