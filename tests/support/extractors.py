"""Front ends for tests that need no wavelets: quick, and at the top of a module, so that processes can build them."""

from dataclasses import dataclass

import torch
from torch import nn


class _Scaled(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, rows):
        return torch.cat([rows.float(), self.factor * rows.float()], dim=1)


@dataclass(frozen=True)
class Scaled:
    """Every image, and beside it the same image times a factor: ``(C, H, W) -> (2 C, H, W)``."""

    factor: float = 2.0
    name: str = "scaled"

    @property
    def settings(self):
        return {"factor": self.factor}

    def output_shape(self, input_shape):
        return 2 * input_shape[0], *input_shape[1:]

    def module(self, input_shape):
        return _Scaled(self.factor)


@dataclass(frozen=True)
class Lying(Scaled):
    """Says another shape than it makes."""

    def output_shape(self, input_shape):
        return 3 * input_shape[0], *input_shape[1:]


@dataclass(frozen=True)
class Mixing(Scaled):
    """Normalises over the batch, as a network with BatchNorm does that was not set to evaluation mode."""

    def module(self, input_shape):
        return nn.Sequential(_Scaled(self.factor), nn.BatchNorm2d(2 * input_shape[0]))


@dataclass(frozen=True)
class Pausing(Scaled):
    """Takes a while for each batch, so that a test can kill it in the middle."""

    def module(self, input_shape):
        return nn.Sequential(_Pause(), _Scaled(self.factor))


class _Pause(nn.Module):
    def forward(self, rows):
        import time

        time.sleep(0.02)
        return rows


@dataclass(frozen=True)
class Pooled:
    """Brightness of an image in some cells a side, as a vector: ``(C, H, W) -> (C cells^2,)``."""

    cells: int = 2
    name: str = "pooled"

    @property
    def settings(self):
        return {"cells": self.cells}

    def output_shape(self, input_shape):
        return (input_shape[0] * self.cells**2,)

    def module(self, input_shape):
        return nn.Sequential(_Scaled(0.0), nn.AdaptiveAvgPool2d(self.cells), nn.Flatten(), _Half())


class _Half(nn.Module):
    def forward(self, x):
        return x[:, : x.shape[1] // 2] / 255


def pooled(images, *, cells=2):
    """A factory as a user would write one."""
    return Pooled(cells)


def doubled(images):
    """A factory of maps, without options."""
    return Scaled(1 / 255)


def vector_head(input_shape, classes):
    """A head of one's own, on vectors."""
    (size,) = input_shape
    return nn.Linear(size, classes)


class _Edges(nn.Module):
    def forward(self, rows):
        x = rows.float() / 255
        across, down = x[..., :-1, 1:] - x[..., :-1, :-1], x[..., 1:, :-1] - x[..., :-1, :-1]
        return torch.cat([x[..., 1:, 1:], across, down, across.abs()], dim=1)


@dataclass(frozen=True)
class Edges:
    """The image and its differences: ``(C, H, W) -> (4 C, H - 1, W - 1)``; channels that are not all the same."""

    name: str = "edges"

    @property
    def settings(self):
        return {}

    def output_shape(self, input_shape):
        return 4 * input_shape[0], input_shape[1] - 1, input_shape[2] - 1

    def module(self, input_shape):
        return _Edges()


def edges(images):
    """A factory of maps with several channels."""
    return Edges()
