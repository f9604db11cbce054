"""``spectral-dp features``: computes the features of a data set into the cache."""

from __future__ import annotations

import json
import os
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spectral_dp.cli.data import CacheOption
from spectral_dp.cli.options import JsonOption, with_settings
from spectral_dp.cli.progress import INTERRUPTED, progress_bar
from spectral_dp.experiments.settings import Settings

if TYPE_CHECKING:
    from spectral_dp.features import ExtractionProgress


#: Settings of a run that say which records there are, and how features are made of them.
_SETTINGS = (
    *("image_size", "data_path", "image_folder", "csv", "text_column", "label_column", "csv_encoding"),
    "feature_options",
)


@partial(with_settings, only=_SETTINGS)
def features_command(
    given: dict[str, Any],
    dataset: Annotated[
        str | None, typer.Argument(metavar="[DATASET]", help="Data set; `spectral-dp data list` has them.")
    ] = None,
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
    mirrored: Annotated[
        bool, typer.Option("--mirrored", help="Also those of the mirrored training images, for augmentation.")
    ] = False,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes, of one thread each (default: the cores).")] = None,
    cache: CacheOption = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare all rows in the cache with their checksums, and repair them.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Computes features of a data set once, into the cache; what is there is kept, and what was stopped goes on.

    \b
    spectral-dp features cifar10 --scattering
    spectral-dp features cifar10 --scattering --mirrored --jobs 2
    spectral-dp features mnist --features scattering --feature-option scales=1
    spectral-dp features cifar10 --prior patches
    spectral-dp features cifar10 --backbone efficientnet-lite0 --image-size 128
    spectral-dp features --image-folder photos --backbone efficientnet-lite0 --image-size 128
    spectral-dp features --csv reviews.csv --text-column review --label-column stars --backbone minilm-l6
    """  # noqa: D301  (\b is for click: keep these lines as they are)
    from spectral_dp.experiments.data_source import load_records  # late: torch takes a second
    from spectral_dp.features import FeatureError, build_extractor
    from spectral_dp.features.datasets import Split, dataset_features, facts_of
    from spectral_dp.features.views import View
    from spectral_dp.pretrained import NAMES

    scattered = "scattering" if scattering else None
    name = _one_name({"--features": features, "--scattering": scattered, "--prior": prior, "--backbone": backbone})
    options: dict[str, Any] = given.pop("feature_options", {})
    if name in NAMES:  # resizes images itself, so that the cache is of the data set as published
        side = given.get("image_size") if "image_folder" in given else given.pop("image_size", None)
        asked = {"weights": weights and str(weights), "image_size": side, "maps": maps or None}
        asked["cache"] = cache and str(cache)
        options |= {option: value for option, value in asked.items() if value is not None}
    elif backbone or weights or maps:
        raise FeatureError(f"--backbone, --weights and --maps are for one of {', '.join(NAMES)}, not for {name}")
    records = load_records(_source(dataset, given), cache=cache)
    extractor = build_extractor(name, facts_of(records), options)
    variants: list[tuple[Split, View]] = [("train", "plain"), ("test", "plain")]
    made = []
    for split, view in variants + [("train", "mirrored")] * mirrored:
        title, started = f"{records.name} {split} {view}", time.perf_counter()
        try:
            with progress_bar(title, "records", quiet=as_json) as update:

                def show(progress: ExtractionProgress) -> None:
                    update(total=progress.total, completed=progress.finished, facts="")

                found = dataset_features(
                    records,
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
        made.append({"split": split, "view": view, "shape": found.shape, "seconds": seconds, "path": str(found.path)})
        if not as_json:
            typer.echo(f"{title}: {' x '.join(map(str, found.shape))}, {seconds} s, {found.path}")
    if as_json:
        typer.echo(json.dumps(made, indent=2))


def _source(dataset: str | None, given: dict[str, Any]) -> Settings:
    """Returns settings that say where the records are."""
    own = given.get("image_folder") or given.get("csv")
    if not (dataset or own):
        raise typer.BadParameter("say of which records: DATASET, --image-folder DIR or --csv FILE")
    if dataset and own:
        raise typer.BadParameter(f"{dataset} and {own} both say which records: give one of them")
    return Settings.from_dict(given | ({"dataset": dataset} if dataset else {}))


def _one_name(given: dict[str, str | None]) -> str:
    """Returns which features were asked for, by one flag or another."""
    names = {flag: name for flag, name in given.items() if name is not None}
    if not names:
        raise typer.BadParameter(f"say which features to compute: {', or '.join(given)}")
    if len(names) > 1:
        raise typer.BadParameter(f"{' and '.join(names)} both say which features to compute: give one of them")
    return next(iter(names.values()))
