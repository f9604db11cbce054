"""Front ends by name, for the command line, for settings and for user code: ours, and anyone's by import path.

Whatever has features adds itself here with :func:`register_extractor`, and can then be cached, prepared, projected and
trained on like scattering: ``spectral-dp features DATASET --features NAME`` and ``spectral-dp train --features NAME``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeAlias

from spectral_dp.features.errors import FeatureError
from spectral_dp.features.extractor import Extractor, Shape
from spectral_dp.features.scattering import Scattering
from spectral_dp.features.upright import Upright
from spectral_dp.import_paths import imported_factory


@dataclass(frozen=True)
class ImageFacts:
    """What a front end may know of the images that it is made for. All of it is public.

    Attributes:
        shape: Shape ``(C, H, W)`` of an image.
        mean: Published mean of each channel, for pixels from 0 to 1.
        std: Published standard deviation of each channel, likewise.
    """

    shape: Shape
    mean: tuple[float, ...]
    std: tuple[float, ...]


#: Called with the facts of the images, and with options by keyword. What it returns must be quick to make: weights and
#: filters are loaded by its ``module``, in the processes that compute.
ExtractorFactory: TypeAlias = Callable[..., Extractor]


@dataclass(frozen=True)
class ExtractorEntry:
    """A front end with what the rest of a run has to know of it.

    Attributes:
        factory: Makes the extractor from :class:`ImageFacts` and options.
        assumption: What the privacy statement says of where it comes from: why it depends on no private record.
        settings: Settings of ``spectral-dp train`` to use with these features where the user gives none.
    """

    factory: ExtractorFactory
    assumption: str
    settings: Mapping[str, Any] = field(default_factory=dict)


_REGISTRY: dict[str, ExtractorEntry] = {}


def register_extractor(
    name: str, factory: ExtractorFactory, *, assumption: str, settings: Mapping[str, Any] | None = None
) -> None:
    """Makes a front end known by name; the latest registration wins.

    Args:
        name: The name on the command line and in settings.
        factory: Called with the :class:`ImageFacts` of a data set, and with the user's options by keyword.
        assumption: What the privacy statement says of where the front end comes from, as ``"fixed wavelets"``.
        settings: Settings of ``spectral-dp train`` to use with these features where the user gives none, such as
            ``{"feature_norm": "group", "feature_groups": 27}``.
    """
    _REGISTRY[name] = ExtractorEntry(factory, assumption, MappingProxyType(dict(settings or {})))


def extractor_names() -> tuple[str, ...]:
    """Returns the names of all registered front ends."""
    return tuple(_REGISTRY)


def extractor_entry(name: str) -> ExtractorEntry:
    """Returns a registered front end, or the factory at an import path ``package.module:factory``.

    Raises:
        FeatureError: If there is none. The message lists what there is.
    """
    if name in _REGISTRY:
        return _REGISTRY[name]
    if ":" in name:
        vouched = "a front end of the user's own, who vouches that it depends on no private record"
        return ExtractorEntry(imported_factory(name, "front end"), vouched)
    raise FeatureError(
        f"unknown features {name!r}: choose one of {', '.join(_REGISTRY)}, or give your own as package.module:factory"
    )


def build_extractor(name: str, images: ImageFacts, options: Mapping[str, Any] | None = None) -> Extractor:
    """Returns the front end of this name for images with these facts.

    Args:
        name: A registered name, or the import path ``package.module:factory`` of a factory of your own.
        images: Public facts of the images.
        options: Options of the front end by name; those that are not given have its defaults. Of images, each has the
            option ``upright`` as well: whether it sees them centred and upright, see :class:`Upright`. A factory that
            has such an option itself keeps it.

    Raises:
        FeatureError: If there is no such front end, or it has no such options.

    >>> build_extractor("scattering", ImageFacts((1, 28, 28), (0.1,), (0.3,)), {"scales": 1}).maps
    9
    """
    factory, options = extractor_entry(name).factory, dict(options or {})
    known = inspect.signature(factory).parameters
    is_upright = options.pop("upright", False) if "upright" not in known else False
    if not isinstance(is_upright, bool):
        raise FeatureError(f"upright must be true or false, got {is_upright!r}")
    is_open = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    if (unknown := [option for option in options if option not in list(known)[1:]]) and not is_open:
        listed = ", ".join([*list(known)[1:], "upright"])
        raise FeatureError(f"the features {name} have no option {', '.join(unknown)}: choose from {listed}")
    try:
        found = factory(images, **options)
        return Upright(found) if is_upright else found
    except TypeError as error:
        raise FeatureError(f"cannot make the features {name} with {options}: {error}") from error


def scattering_of(images: ImageFacts, *, scales: int = 2, angles: int = 8, order: int = 2) -> Scattering:
    """Returns the scattering of the paper for some images, with their published mean and standard deviation."""
    return Scattering(images.mean, images.std, scales, angles, order)


register_extractor(
    "scattering",
    scattering_of,
    assumption="wavelets that are fixed by a formula",
    settings={"feature_norm": "group", "feature_groups": 27},
)
