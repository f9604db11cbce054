"""Block-circulant linear layers (Section IV of the paper) and the conversion of dense layers to them.

Letters, here and in ``gradients/block_circulant.py``:

    d     block size                       x   (N, q, d) input in blocks, filled up with zeros
    p, q  blocks of rows, of columns       y   (N, p, d) output in blocks, of which surplus numbers are dropped
    w     (p, q, d) parameters; block (i, j) of the matrix is the circulant W_ij[r, c] = w_ij[(c - r) mod d]

A circulant matrix is diagonal in Fourier space: with the orthonormal transform,
``Y_i(f) = √d Σ_j conj(W_ij(f)) X_j(f)``. In the real coordinates of ``transforms.py``, a pair ``(cosine, sine)`` needs
Gauss's three products instead of four,

    P1 = xc (wc + ws)     P2 = xs (wc - ws)     P3 = (xc - xs) (-ws)     yc = P1 + P3, ys = P2 + P3     (times √(d/2))

and DC and Nyquist need one each, ``y = √d x w``. With matrices ``A``, ``V``, ``C`` of shape ``(R, d)``, where ``R`` is
about ``3d/2``:

    y_i = C^t Σ_j (A x_j) * (V w_ij)          gradient of w_ij:  V^t Σ_n (A x_nj) * (C dA_ni)

This takes a small matrix product for every block, and ``R`` products of ``(N, q)`` with ``(q, p)``. The dense layer is
``d²`` such products.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectral_dp.mechanism.transforms import get_transform
from spectral_dp.split_attention import SplitAttention

#: Blocks of at most this many numbers are transformed by a matrix, and longer ones by the FFT. The limit was measured
#: by ``benchmarks/bench_block_circulant.py --paths``, as was the rule in ``_prefers_dense``.
SHORT_BLOCK = 32

#: Number of input rows that are processed at a time, so that intermediate results stay in the cache.
ROWS = 1024


class BlockCirculantLinear(nn.Module):
    """A linear layer whose matrix consists of circulant blocks. It has ``d`` times fewer parameters than a dense one.

    The parameters are ``weight (p, q, d)``, which holds the first row of every block, and ``bias (m,)``, where
    ``p = ceil(m / d)`` and ``q = ceil(n / d)``.

    Args:
        in_features: Size ``n`` of each input.
        out_features: Size ``m`` of each output.
        block_size: Size ``d`` of the blocks, at most the larger of ``n`` and ``m``. It need not divide them. Blocks at
            the edge of the matrix are then cut off.
        bias: Whether the layer adds a bias.
        device: Device of the parameters.
        dtype: Data type of the parameters.

    >>> BlockCirculantLinear(2048, 1024, block_size=8)
    BlockCirculantLinear(in_features=2048, out_features=1024, block_size=8, bias=True, compression=8x)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        block_size: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        largest, sides = max(in_features, out_features), f"{in_features} -> {out_features}"
        if min(in_features, out_features) < 1:
            raise ValueError(f"a layer needs at least one input and one output, got {sides}")
        if isinstance(block_size, bool) or not isinstance(block_size, int):
            raise TypeError(f"block_size must be an integer, got {block_size!r}")
        if not 1 <= block_size <= largest:
            raise ValueError(f"block_size must be from 1 to {largest} for a layer {sides}, got {block_size}")
        self.in_features, self.out_features, self.block_size = in_features, out_features, block_size
        p, q = math.ceil(out_features / block_size), math.ceil(in_features / block_size)
        self.weight = nn.Parameter(torch.empty(p, q, block_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws new parameters, as ``nn.Linear`` does.

        A row of the matrix holds ``n`` different parameters, so the outputs have the same variance as there.
        """
        bound = 1 / math.sqrt(self.in_features)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the output of the layer: ``(..., n) -> (..., m)``."""
        if x.ndim == 0 or x.shape[-1] != self.in_features:
            last = x.shape[-1] if x.ndim else "missing"  # not the whole shape: the number of samples is private
            raise ValueError(f"expected an input of shape (..., {self.in_features}), but its last dimension is {last}")
        autocast = not x.is_meta and torch.is_autocast_enabled(x.device.type)
        full_precision = self.weight.dtype in (torch.float32, torch.float64) and not autocast
        if not full_precision or not x.numel() or _prefers_dense(*self.weight.shape):
            return F.linear(x, self._dense_weight(), self.bias)
        if x.ndim == 1:
            return self(x[None])[0]
        product = (_short_blocks if self.block_size <= SHORT_BLOCK else _long_blocks)(self.weight)
        parts = []
        for part in x.split(max(1, ROWS * len(x) * self.in_features // x.numel())):
            blocks = to_blocks(part.reshape(-1, self.in_features), self.block_size)
            y = product(blocks).flatten(1)[:, : self.out_features].reshape(*part.shape[:-1], self.out_features)
            parts.append(y if self.bias is None else y + self.bias)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def to_dense(self) -> nn.Linear:
        """Returns a dense layer that computes the same function."""
        linear = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        return _filled(linear, self._dense_weight(), self)

    @classmethod
    def from_linear(cls, linear: nn.Linear, block_size: int) -> Self:
        """Returns the block-circulant layer that is closest to a dense layer by least squares.

        Each parameter is the mean over the existing entries of one diagonal of a block.
        """
        layer = cls(linear.in_features, linear.out_features, block_size, linear.bias is not None, device="meta")
        p, q, d = layer.weight.shape
        dense = linear.weight.detach().to(torch.promote_types(linear.weight.dtype, torch.float32))
        index, beyond = _circulant_index(q, d, dense.device), (0, -dense.shape[1] % d, 0, -dense.shape[0] % d)
        entries = (F.pad(t, beyond).reshape(p, -1) for t in (dense, torch.ones_like(dense)))
        total, count = (dense.new_zeros(p, q * d).index_add_(1, index, t) for t in entries)
        return _filled(layer, (total / count.clamp(min=1)).view(p, q, d), linear)

    def extra_repr(self) -> str:
        """Returns the sizes and the compression: the weights of a dense layer over those of this one."""
        n, m, d = self.in_features, self.out_features, self.block_size
        compression = f"compression={n * m / self.weight.numel():.3g}x"
        return f"in_features={n}, out_features={m}, block_size={d}, bias={self.bias is not None}, {compression}"

    def _dense_weight(self) -> Tensor:
        p, q, d = self.weight.shape
        rows = self.weight.reshape(p, q * d).index_select(1, _circulant_index(q, d, self.weight.device))
        return rows.view(p * d, q * d)[: self.out_features, : self.in_features]


def convert_linear(
    module: nn.Module,
    block_size: int = 8,
    last_block_size: int | None = None,
    skip: str | Collection[str] | Callable[[str, nn.Module], bool] = (),
    weights: Literal["project", "fresh"] = "project",
) -> nn.Module:
    """Returns a copy of a model in which the ``nn.Linear`` layers are replaced by block-circulant ones.

    The model itself is not changed, as with ``ModuleValidator.fix`` of Opacus, so make the optimizer from the
    parameters of the copy. A model that is one ``nn.Linear`` becomes one :class:`BlockCirculantLinear`. The ``Conv1D``
    of transformers (GPT-2), which is a dense layer with its weight transposed, is converted, too. So are the four
    projections of ``nn.MultiheadAttention``, which becomes a :class:`~spectral_dp.split_attention.SplitAttention`.

    The following layers are not converted:

    - subclasses of ``nn.Linear`` with a ``forward`` of their own;
    - layers whose weight is computed, for instance by weight norm;
    - ``nn.MultiheadAttention`` with ``add_bias_kv`` or ``add_zero_attn``.

    Args:
        module: Model to convert.
        block_size: Block size ``d`` of the new layers.
        last_block_size: Block size of the last converted layer, if it is different (a classifier with few outputs).
        skip: Names of layers, or of modules that contain them, that are not converted. Or a function of
            ``(name, layer)`` that returns whether to skip a layer: pretrained layers that are to stay dense.
        weights: ``"project"`` makes each new layer the block-circulant layer closest to the one that it replaces (by
            least squares). ``"fresh"`` draws its parameters anew: of a layer that was not trained, the projection is
            smaller than a new layer by a factor of about the root of the block size.

    Raises:
        ValueError: If a layer is smaller than its block size or shares its weight with another layer, or if ``skip``
            names a module that does not exist. The message names the layer.

    >>> model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    >>> convert_linear(model, block_size=8, last_block_size=5)[2]
    BlockCirculantLinear(in_features=32, out_features=10, block_size=5, bias=True, compression=4.57x)
    """
    if weights not in ("project", "fresh"):
        raise ValueError(f"unknown weights {weights!r}: choose 'project' or 'fresh'")
    module = copy.deepcopy(module)
    users = Counter(id(parameter) for m in module.modules() for parameter in m._parameters.values())
    skips = skip if callable(skip) else _named(skip, module)
    module = _with_split_attention(module, skips)
    inner = {m.out_proj for m in module.modules() if isinstance(m, nn.MultiheadAttention)}
    candidates = {name: m for name, m in module.named_modules() if _is_dense(m) and m not in inner}
    layers = {name: m for name, m in candidates.items() if not skips(name, m)}
    converted: dict[nn.Module | None, nn.Module] = {}
    for number, (name, linear) in enumerate(layers.items(), 1):
        d = block_size if last_block_size is None or number < len(layers) else last_block_size
        try:
            if users[id(linear.weight)] > 1:
                raise ValueError("it shares its weight with another layer")
            converted[linear] = layer = BlockCirculantLinear.from_linear(_as_linear(linear), d)
            if weights == "fresh":
                layer.reset_parameters()
        except ValueError as error:
            fix = "give it a smaller block_size (last_block_size if it is the last layer), or add it to skip"
            raise ValueError(f"cannot convert layer {name!r}: {error}; {fix}") from error
    for part in module.modules():
        if isinstance(part, nn.TransformerEncoderLayer):
            part.activation_relu_or_gelu = 0  # its fused path would read the weights as dense
        if isinstance(part, nn.TransformerEncoder):
            part.use_nested_tensor = False  # which only the fused path can read
    return with_replaced(module, converted)


def _with_split_attention(module: nn.Module, skips: Callable[[str, nn.Module], bool]) -> nn.Module:
    """Replaces attention whose projections are one parameter by one that has a layer for each, in place."""
    split: dict[nn.Module | None, nn.Module] = {
        m: SplitAttention.from_attention(m)
        for name, m in module.named_modules()
        if type(m) is nn.MultiheadAttention and m.bias_k is None and not m.add_zero_attn and not skips(name, m)
    }
    return with_replaced(module, split)


def with_replaced(module: nn.Module, by: Mapping[nn.Module | None, nn.Module]) -> nn.Module:
    """Puts other modules into the places of some, and returns the module, or what takes its own place."""
    for parent in list(module.modules()):
        for name, child in parent._modules.items():
            parent._modules[name] = by.get(child, child)
    return by.get(module, module)


class FrequencyBand(NamedTuple):
    """Some frequencies of blocks of ``d`` numbers.

    Attributes:
        d: Block size.
        singles: The frequencies with one real coordinate (DC, Nyquist).
        pairs: The frequencies with two real coordinates.
    """

    d: int
    singles: tuple[int, ...]
    pairs: tuple[int, ...]

    @classmethod
    def of(cls, d: int, frequencies: Sequence[int]) -> FrequencyBand:
        """Returns the band of these frequencies."""
        return cls(d, tuple(f for f in frequencies if 2 * f % d == 0), tuple(f for f in frequencies if 2 * f % d))


@lru_cache(maxsize=128)
def bilinear(band: FrequencyBand, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Returns ``A, V, C``, each ``(R, d)``: the rows of the singles, then those of ``P1``, of ``P2`` and of ``P3``."""
    ones, twos = len(band.singles), len(band.pairs)
    with torch.inference_mode(False):  # they are cached, and training cannot use inference tensors
        rows = [max(2 * f - 1, 0) for f in band.singles + band.pairs] + [2 * f for f in band.pairs]
        single, c, s = get_transform("fourier").basis(band.d)[rows].split([ones, twos, twos])
        A = torch.cat([single, c, s, c - s])
        V = torch.cat([math.sqrt(2) * single, c + s, c - s, -s]) * math.sqrt(band.d / 2)
        C = torch.cat([single, c, s, c + s])
        return A.to(device, dtype), V.to(device, dtype), C.to(device, dtype)


def on_blocks(matrix: Tensor, blocks: Tensor) -> Tensor:
    """Returns the product of an ``(R, d)`` matrix with every block: ``(N, n, d) -> (N, R, n)``."""
    return torch.bmm(matrix.expand(len(blocks), *matrix.shape), blocks.mT)


def to_blocks(t: Tensor, d: int) -> Tensor:
    """Returns ``t`` in blocks, filled up with zeros: ``(..., n) -> (..., ceil(n / d), d)``."""
    return (F.pad(t, (0, -t.shape[-1] % d)) if t.shape[-1] % d else t).unflatten(-1, (-1, d))


def _short_blocks(w: Tensor) -> Callable[[Tensor], Tensor]:
    """Returns the function that multiplies by ``w`` in real coordinates: ``(N, q, d) -> (N, p, d)``."""
    A, V, C = bilinear(FrequencyBand.of(w.shape[-1], range(w.shape[-1] // 2 + 1)), w.dtype, w.device)
    W = on_blocks(V, w).permute(1, 2, 0)  # (R, q, p)
    return lambda x: torch.bmm(on_blocks(A, x).transpose(0, 1), W).permute(1, 2, 0) @ C


def _long_blocks(w: Tensor) -> Callable[[Tensor], Tensor]:
    """Returns the same function as :func:`_short_blocks`, computed by FFT."""
    W = torch.fft.rfft(w).permute(2, 1, 0).conj().resolve_conj()  # because products with lazy conjugates are slow

    def product(x: Tensor) -> Tensor:
        Y = torch.bmm(torch.fft.rfft(x, norm="ortho").permute(2, 0, 1), W).permute(1, 2, 0)
        return torch.fft.irfft(Y, n=w.shape[-1], norm="ortho")

    return product


def _prefers_dense(p: int, q: int, d: int) -> bool:
    """Returns whether the dense matrix is quicker: for small layers, and for few inputs or few outputs.

    For each row of input, the dense product takes ``n m`` multiplications. Ours takes ``R p q``, and every number that
    is transformed takes as long as 128 multiplications.
    """
    n, m, R = q * d, p * d, 2 * d - (d // 2 + 1)
    return n * m - R * p * q <= 128 * (n + m)


@lru_cache(maxsize=128)
def _circulant_index(q: int, d: int, device: torch.device) -> Tensor:
    """Returns, for each of the ``(d, q d)`` entries of a row of blocks (flattened), the index of its parameter."""
    with torch.inference_mode(False):
        r, j, c = torch.meshgrid(torch.arange(d), torch.arange(q), torch.arange(d), indexing="ij")
        return (j * d + (c - r) % d).flatten().to(device)


def _filled(layer: Any, weight: Tensor, source: Any) -> Any:
    """Returns ``layer`` with this weight, and with the bias, dtype and mode of the layer that it replaces."""
    layer.weight = nn.Parameter(weight.detach().to(source.weight.dtype, copy=True), source.weight.requires_grad)
    if source.bias is not None:
        layer.bias = nn.Parameter(source.bias.detach().clone(), source.bias.requires_grad)
    return layer.train(source.training)


def _is_dense(layer: nn.Module) -> bool:
    """Returns whether a layer is dense and holds its weight itself: with weight norm, for instance, it is computed."""
    is_linear = isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward
    return "weight" in layer._parameters and (is_linear or _is_transposed(layer))


def _is_transposed(layer: nn.Module) -> bool:
    """Returns whether a layer is the ``Conv1D`` of transformers, which need not be installed."""
    return (type(layer).__name__, type(layer).__module__) == ("Conv1D", "transformers.pytorch_utils")


def _as_linear(layer: Any) -> nn.Linear:
    if not _is_transposed(layer):
        return layer
    n, m = layer.weight.shape
    return _filled(nn.Linear(n, m, device="meta"), layer.weight.T, layer)


def _named(skip: str | Collection[str], module: nn.Module) -> Callable[[str, nn.Module], bool]:
    names = {skip} if isinstance(skip, str) else set(skip)
    unknown = names - {name for name, _ in module.named_modules(remove_duplicate=False)}
    if unknown:
        raise ValueError(f"skip names modules that are not in the model: {sorted(unknown)}")
    return lambda name, _: any(name == skipped or name.startswith(f"{skipped}.") for skipped in names)
