"""The noise-law audit: whether what is added to a release is the noise that is claimed.

Releases of batches that contribute nothing are noise alone. This noise is taken apart into the draws it was made of, in
units of the deviation that is claimed for them (:func:`~spectral_dp.audit.instruments.noise_map.standardise_noise`).
They are tested for being independent standard normals, across coordinates, layers and steps. Where gains or a crop
shape the noise, there is no single deviation to claim: the linear-map audit judges its scale, and only its law is
judged here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spectral_dp.audit.instruments.noise_map import NoiseMap, standardise_noise
from spectral_dp.audit.report import Verdict
from spectral_dp.audit.statistics.noise_law import judge_noise
from spectral_dp.audit.targets.target import Target

#: Coordinates tested of every parameter: its first, which a generator started again would repeat, and its last.
MOST_COORDINATES = 4096


def check_noise_law(target: Target, noise: NoiseMap | None, steps: int, confidence: float) -> Verdict:
    """Tests the noise of ``steps`` releases.

    Args:
        target: The target to audit.
        noise: The noise map of the target. None where its noise cannot be controlled: then the numbers that it releases
            are tested as they are.
        steps: How many releases to look at.
        confidence: Probability with which noise as claimed must pass.
    """
    pieces: list[list[Tensor]] = []
    for _ in range(steps):
        release = target.release([target.null()] * 2)
        pieces.append([_ends(z) for z in standardise_noise(release, noise, target.outputs)])
    residuals = torch.stack([torch.cat(piece) for piece in pieces])
    widths = [len(z) for z in pieces[0]]
    if noise is None:
        residuals = residuals[:, residuals.abs().amax(0) > 0]  # dropped by a filter, or without noise
    if residuals.shape[1] == 0 or not bool(residuals.isfinite().all()):
        note = "there is no noise" if residuals.shape[1] == 0 else "the noise is not finite"
        p_values = {"any": 0.0}
    else:
        blocks = _slices(widths) if sum(widths) == residuals.shape[1] and len(widths) > 1 else ()
        law = judge_noise(residuals, confidence=confidence, blocks=blocks)
        p_values = law.p_values
        note = f"deviation {law.scale:.4g} times the claimed one" if law.ok else law.verdict
    tested = f"{residuals.shape[1]} coordinates of {len(widths)} parameters, {steps} steps"
    p, details = min(p_values.values()), {"p_values": p_values}
    claimed = ("p-value of the claimed noise", 1 - confidence)
    return Verdict("noise law", tested, *claimed, p, "at least", confidence, note=note, details=details)


def _ends(numbers: Tensor) -> Tensor:
    half = MOST_COORDINATES // 2
    return numbers if len(numbers) <= MOST_COORDINATES else torch.cat([numbers[:half], numbers[-half:]])


def _slices(widths: list[int]) -> list[slice]:
    ends = torch.tensor(widths).cumsum(0).tolist()
    return [slice(end - width, end) for end, width in zip(ends, widths, strict=True) if width]
