"""``spectral-dp features``: computes the features of a data set into the cache."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spectral_dp.cli.options import named_values, plain_errors
from spectral_dp.cli.progress import INTERRUPTED, progress_bar

if TYPE_CHECKING:
    from spectral_dp.features import ExtractionProgress


def features_command(
    dataset: Annotated[str, typer.Argument(metavar="DATASET", help="Data set; `spectral-dp data list` has them.")],
    features: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Which features: scattering, a pretrained network, or package.module:factory."
        ),
    ] = None,
    scattering: Annotated[
        bool, typer.Option("--scattering", help="Wavelet scattering, two scales, eight angles, order two unless said.")
    ] = False,
    prior: Annotated[str | None, typer.Option(metavar="NAME", help="Features from generated images: patches.")] = None,
    backbone: Annotated[
        str | None, typer.Option(metavar="NAME", help="A pretrained network; `spectral-dp weights list` has them.")
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(help="File with weights of the backbone, instead of those in the cache.")
    ] = None,
    maps: Annotated[
        bool, typer.Option("--maps", help="The last maps of the backbone, rather than their average over positions.")
    ] = False,
    feature_option: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Option of the features. May be repeated.")
    ] = None,
    mirrored: Annotated[
        bool, typer.Option("--mirrored", help="Also those of the mirrored training images, for augmentation.")
    ] = False,
    image_size: Annotated[int | None, typer.Option(help="Resize images to this many pixels a side.")] = None,
    data_path: Annotated[
        Path | None, typer.Option(help="File or directory with the official files, instead of the cache.")
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes, of one thread each (default: the cores).")] = None,
    cache: Annotated[
        Path | None, typer.Option(help="Cache directory, instead of $SPECTRAL_DP_CACHE or the user's cache directory.")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare all rows in the cache with their checksums, and repair them.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Computes features of a data set once, into the cache; what is there is kept, and what was stopped goes on.

    \b
    spectral-dp features cifar10 --scattering
    spectral-dp features cifar10 --scattering --mirrored --jobs 2
    spectral-dp features mnist --features scattering --feature-option scales=1
    spectral-dp features cifar10 --prior patches
    spectral-dp features cifar10 --backbone efficientnet-lite0 --image-size 128
    """  # noqa: D301  (\b is for click: keep these lines as they are)
    with plain_errors():
        from spectral_dp.data import load_dataset  # late: torch takes a second
        from spectral_dp.features import FeatureError, build_extractor
        from spectral_dp.features.datasets import Split, dataset_features, facts_of
        from spectral_dp.features.views import View
        from spectral_dp.pretrained import NAMES

        scattered = "scattering" if scattering else None
        name = _one_name({"--features": features, "--scattering": scattered, "--prior": prior, "--backbone": backbone})
        options: dict[str, Any] = dict(named_values(feature_option or []))
        images = load_dataset(dataset, path=data_path, cache=cache)
        if name in NAMES:  # resizes images itself, so that the cache is of the data set as published
            given = {"weights": weights and str(weights), "image_size": image_size, "maps": maps or None}
            given["cache"] = cache and str(cache)
            options |= {option: value for option, value in given.items() if value is not None}
        elif backbone or weights or maps:
            raise FeatureError(f"--backbone, --weights and --maps are for one of {', '.join(NAMES)}, not for {name}")
        elif image_size:
            images = images.resized(image_size)
        extractor = build_extractor(name, facts_of(images), options)
        variants: list[tuple[Split, View]] = [("train", "plain"), ("test", "plain")]
        made = []
        for split, view in variants + [("train", "mirrored")] * mirrored:
            title, started = f"{dataset} {split} {view}", time.perf_counter()
            try:
                with progress_bar(title, "images", quiet=as_json) as update:

                    def show(progress: ExtractionProgress) -> None:
                        update(total=progress.total, completed=progress.finished, facts="")

                    found = dataset_features(
                        images,
                        extractor,
                        split,
                        views=(view,),
                        cache=cache,
                        jobs=jobs or os.cpu_count() or 1,
                        verify=verify,
                        show=show,
                    )
            except KeyboardInterrupt:
                typer.echo("stopped; the same command goes on", err=True)
                raise typer.Exit(INTERRUPTED) from None
            seconds = round(time.perf_counter() - started, 1)
            made.append(
                {"split": split, "view": view, "shape": found.shape, "seconds": seconds, "path": str(found.path)}
            )
            if not as_json:
                typer.echo(f"{title}: {' x '.join(map(str, found.shape))}, {seconds} s, {found.path}")
    if as_json:
        typer.echo(json.dumps(made, indent=2))


def _one_name(given: dict[str, str | None]) -> str:
    """Returns which features were asked for, by one flag or another."""
    names = {flag: name for flag, name in given.items() if name is not None}
    if not names:
        raise typer.BadParameter(f"say which features to compute: {', or '.join(given)}")
    if len(names) > 1:
        raise typer.BadParameter(f"{' and '.join(names)} both say which features to compute: give one of them")
    return next(iter(names.values()))
