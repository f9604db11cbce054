"""Look at public priors: generated images, the patches that are learnt from them, and what their spectrum reaches.

    python examples/priors.py [--figures docs] [--atoms 100] [--images 1500]

Prints, for several sets of images, which share of their features' variance lies on the first axes that *generated*
images give. No private image is read, so nothing here costs privacy. The last set is made to look like nothing that the
generator draws: there the prior is of little use.
"""

import argparse
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from spectral_dp.features import DictionarySettings, Patches
from spectral_dp.priors import PRIORS, generate_images, spectrum_of
from spectral_dp.priors.dictionary import learn_dictionary

SHAPE = (3, 32, 32)
AXES = (10, 30, 100, 300)
GREY = ("grey-leaves", "strokes")


def barcodes(count: int) -> torch.Tensor:
    """Images of bars of one or two pixels, straight up and without shading: nothing that the prior draws."""
    generator = torch.Generator().manual_seed(1)
    bars = (torch.rand(count, 1, 1, SHAPE[2], generator=generator) > 0.5).expand(count, *SHAPE)
    return (bars * 255).to(torch.uint8).contiguous()


def image_sets(count: int) -> dict[str, torch.Tensor]:
    return {
        "dead leaves of another seed": generate_images("dead-leaves", count, SHAPE, seed=1),
        "pen strokes": generate_images("strokes", count, SHAPE, seed=1),
        "1/f noise": generate_images("one-over-f", count, SHAPE, seed=1),
        "white noise": generate_images("white-noise", count, SHAPE, seed=1),
        "barcodes": barcodes(count),
    }


def shares(spectrum, module, images) -> torch.Tensor:
    """Which share of the variance of features lies on the first axes, for every number of axes."""
    features = module(images).flatten(1)
    features = features - features.mean(0)
    caught = (features @ spectrum.basis).square().sum(0).cumsum(0)
    return caught / features.square().sum()


def draw_images(path: Path) -> None:
    """Ten images of each prior, and below them the set that none of them looks like."""
    from matplotlib import pyplot as plt

    sets = {name: generate_images(name, 10, (1, 28, 28) if name in GREY else SHAPE) for name in PRIORS}
    sets["barcodes"] = barcodes(10)
    figure, axes = plt.subplots(len(sets), 10, figsize=(7.2, 3.8), layout="constrained")
    for row, (name, images) in zip(axes, sets.items(), strict=True):
        for axis, image in zip(row, images, strict=True):
            axis.imshow(image.expand(3, -1, -1).permute(1, 2, 0).numpy(), interpolation="nearest")
            axis.set(xticks=[], yticks=[])
        row[0].set_ylabel(name, rotation=0, ha="right", va="center")
    figure.savefig(path, dpi=80)
    plt.close(figure)


def draw_patches(path: Path, atoms: int) -> None:
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(7.2, 2.6), layout="constrained")
    for axis, name in zip(axes, ("dead-leaves", "strokes", "white-noise"), strict=True):
        patches = learn_dictionary(PRIORS[name], SHAPE, size=6, atoms=atoms).pictures()[:64]
        patches = 0.5 + patches / (2.5 * patches.flatten(1).abs().amax(1).view(-1, 1, 1, 1))
        board = torch.nn.functional.pad(patches, (1, 0, 1, 0), value=1.0)
        rows = [torch.cat(list(row), dim=2) for row in board.split(8) if len(row) == 8]
        axis.imshow(torch.cat(rows, dim=1).permute(1, 2, 0).numpy())
        axis.set(xticks=[], yticks=[], title=name)
    figure.savefig(path, dpi=90)
    plt.close(figure)


def draw_spectrum(path: Path, spectrum, caught: dict[str, torch.Tensor]) -> None:
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    number = range(1, spectrum.rank + 1)
    left.loglog(number, (spectrum.eigenvalues / spectrum.eigenvalues[0]).tolist(), label="λ / λ₁")
    left.loglog(number, spectrum.gains(0.5, damp=1e-3).tolist(), label="gains, p = 1/2, damp = 0.001")
    left.set(xlabel="axis", title="spectrum of the prior")
    left.legend()
    for name, share in caught.items():
        right.semilogx(number, share.tolist(), label=name)
    right.set(xlabel="axes kept", ylim=(0, 1), title="share of the variance on them")
    right.legend(fontsize="x-small", loc="upper left", framealpha=0.5)
    figure.savefig(path, dpi=90)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figures", type=Path, help="directory to draw figures into")
    parser.add_argument("--atoms", type=int, default=100)
    parser.add_argument("--images", type=int, default=1500)
    args = parser.parse_args()
    patches = Patches((DictionarySettings(size=6, atoms=args.atoms),))
    spectrum = spectrum_of(patches, SHAPE, images=args.images)
    module, sets = patches.module(SHAPE), image_sets(200)
    caught = {name: shares(spectrum, module, images) for name, images in sets.items()}
    kept = [k for k in AXES if k <= spectrum.rank]
    table = Table("images", *(f"{k} axes" for k in kept), title="share of the features' variance on axes of the prior")
    for name, share in caught.items():
        table.add_row(name, *(f"{100 * share[k - 1]:.0f} %" for k in kept))
    Console().print(table)
    if args.figures is not None:
        import matplotlib

        matplotlib.use("Agg")
        draw_images(args.figures / "priors_images.png")
        draw_patches(args.figures / "priors_patches.png", args.atoms)
        draw_spectrum(args.figures / "priors_spectrum.png", spectrum, caught)


if __name__ == "__main__":
    main()
