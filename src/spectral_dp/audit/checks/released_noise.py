"""The noise-law audit: is what is added to a release the noise that is claimed?

Releases of batches that contribute nothing are noise alone. It is taken apart into the draws it was made of
(:mod:`~spectral_dp.audit.noise_map`), over the deviation that is claimed for them, and tested for being independent
standard normals: across coordinates, layers and steps. Where gains or a crop shape the noise there is no single
deviation to claim; there its scale is judged by the linear-map audit, and only its law here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spectral_dp.audit.noise_map import NO_NOISE, NoiseMap, Part
from spectral_dp.audit.report import Verdict, timed
from spectral_dp.audit.statistics.noise_law import noise_law
from spectral_dp.audit.targets.target import Output, Target

#: Coordinates tested of every parameter: its first, which a generator started again would repeat, and its last.
MOST_COORDINATES = 4096


def released_noise(target: Target, noise: NoiseMap | None, steps: int, confidence: float) -> Verdict:
    """Tests the noise of ``steps`` releases.

    Args:
        target: What to audit.
        noise: Its noise map, or None where its noise cannot be controlled: then numbers are tested as they are.
        steps: How many releases to look at.
        confidence: That noise as claimed is not rejected.
    """
    with timed() as watch:
        pieces: list[list[Tensor]] = []
        for _ in range(steps):
            release = target.release([target.null()] * 2)
            pieces.append([_ends(z) for z in noise_of_parameters(release, noise, target.outputs)])
        residuals = torch.stack([torch.cat(piece) for piece in pieces])
        widths = [len(z) for z in pieces[0]]
        if noise is None:
            residuals = residuals[:, residuals.abs().amax(0) > 0]  # dropped by a filter, or without noise
        if residuals.shape[1] == 0 or not bool(residuals.isfinite().all()):
            note = "there is no noise" if residuals.shape[1] == 0 else "the noise is not finite"
            p_values = {"any": 0.0}
        else:
            blocks = _slices(widths) if sum(widths) == residuals.shape[1] and len(widths) > 1 else None
            law = noise_law(residuals, claimed_std=1.0, confidence=confidence, blocks=blocks)
            p_values = law.p_values
            note = f"deviation {law.scale:.4g} times the claimed one" if law.ok else law.verdict
        p = min(p_values.values())
    return Verdict(
        audit="noise law",
        tested=f"{residuals.shape[1]} coordinates of {len(widths)} parameters, {steps} steps",
        quantity="p-value of the claimed noise",
        claimed=1 - confidence,
        measured=p,
        wanted="at least",
        confidence=confidence,
        ok=p >= 1 - confidence,
        seconds=watch.seconds,
        note=note,
        details={"p_values": p_values},
    )


def noise_of_parameters(release: Tensor, noise: NoiseMap | None, outputs: list[Output]) -> list[Tensor]:
    """The noise of every parameter as numbers that are standard normal if the claim holds."""
    if noise is None:
        sizes = [output.size for output in outputs]
        pieces = zip(release.split(sizes), outputs, strict=True)
        return [numbers / (output.noise_std or 1.0) for numbers, output in pieces]
    floor = NO_NOISE * noise.largest
    if len(noise.parts) == len(outputs):
        return [_undo(part, release, output, floor) for part, output in zip(noise.parts, outputs, strict=True)]
    deviations, along = noise.parts[0].along_axes(release)  # one map for everything: its scale is as measured
    return [(along / deviations)[deviations > floor]]


def _undo(part: Part, release: Tensor, output: Output, floor: float) -> Tensor:
    """What a part's noise was drawn from, in units of the claimed deviation."""
    lengths = part.maps.norm(dim=1)  # of every column, (1 or L, M)
    if part.maps.shape[1] == 1 and part.maps.shape[2] == 1:
        along, deviations = release[part.start : part.stop, None], lengths
    elif part.maps.shape[2] <= part.maps.shape[1] and bool((lengths > floor).all()):
        blocks = release[part.start : part.stop].view(part.count, -1, 1)
        drawn = part.inverse @ blocks
        along, deviations = drawn.squeeze(2) * lengths, lengths
    else:
        deviations, along = part.along_axes(release)
    deviations = deviations.expand_as(along)
    kept = deviations > floor
    scale = deviations if output.noise_std is None else torch.full_like(deviations, output.noise_std)
    return (along / scale)[kept]


def _ends(numbers: Tensor) -> Tensor:
    half = MOST_COORDINATES // 2
    return numbers if len(numbers) <= MOST_COORDINATES else torch.cat([numbers[:half], numbers[-half:]])


def _slices(widths: list[int]) -> list[slice]:
    ends = torch.tensor(widths).cumsum(0).tolist()
    return [slice(end - width, end) for end, width in zip(ends, widths, strict=True) if width]
