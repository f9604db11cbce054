"""Augmented views of images, of which features are cached like those of the images themselves."""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor

from spectral_dp.features.errors import FeatureError

View = Literal["plain", "mirrored"]
VIEWS: tuple[View, ...] = get_args(View)


def view_of(rows: Tensor, view: View) -> Tensor:
    """Returns the view of each image: ``(B, C, H, W) -> (B, C, H, W)``."""
    if view not in VIEWS:
        raise FeatureError(f"unknown view {view!r}: choose one of {', '.join(VIEWS)}")
    if view == "mirrored" and rows.ndim != 4:
        raise FeatureError(f"only images (B, C, H, W) can be mirrored, got rows of shape {tuple(rows.shape[1:])}")
    return rows.flip(-1) if view == "mirrored" else rows
