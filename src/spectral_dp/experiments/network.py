"""From the settings of a run to its network."""

from __future__ import annotations

import torch
from torch import nn

from spectral_dp import models
from spectral_dp.experiments.fine_tuning import is_fine_tuned, tuned_network
from spectral_dp.experiments.settings import ONE_SHOT, ResolvedSettings, SettingsError
from spectral_dp.layers import BlockCirculantLinear


def build_network(settings: ResolvedSettings, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Returns the network of a run on its device, with fresh weights by its seed where they are not pretrained."""
    if is_fine_tuned(settings) and settings.zero_last_layer:
        raise SettingsError(
            f"zero_last_layer is for networks that begin at random, not for {settings.model}: leave it out"
        )
    torch.manual_seed(settings.seed)
    model = tuned_network(settings, classes) if is_fine_tuned(settings) else _fresh(settings, input_shape, classes)
    try:
        return model.to(settings.device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise SettingsError(f"cannot use device {settings.device!r} ({reason}): use cpu") from error


def _fresh(settings: ResolvedSettings, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    model = models.build(
        settings.model,
        input_shape=input_shape,
        classes=classes,
        activation=settings.activation,
        group_norm=settings.group_norm,
        weight_standardization=settings.weight_standardization,
        block_size=settings.block_size or None,
        last_block_size=settings.last_block_size,
        dense_layers=settings.dense_layers,
    )
    if settings.feature_scale != 1 and settings.method not in ONE_SHOT:  # which have no gradients to clip
        if not isinstance(model, models.ScatterLinear):
            raise SettingsError(
                f"feature_scale is for a linear head on features, not for {settings.model}: leave it out"
            )
        model.feature_scale = settings.feature_scale
    if settings.zero_last_layer:
        _start_at_zero(model, settings.model, input_shape)
    return model


def _start_at_zero(model: nn.Module, name: str, input_shape: tuple[int, ...]) -> None:
    """Lets the output layer begin at zero: the first steps are not spent on undoing random scores."""
    called: list[tuple[nn.Module, bool]] = []  # dense layers as they are used, and whether their inputs are zeros
    dense = [layer for layer in model.modules() if isinstance(layer, nn.Linear | BlockCirculantLinear)]
    hooks = [layer.register_forward_pre_hook(lambda m, args: called.append((m, not args[0].any()))) for layer in dense]
    was_training = model.training
    with torch.no_grad():
        model.eval()(torch.ones(2, *input_shape))
        last = called[-1][0] if called else None
        for parameter in last.parameters() if last is not None else ():
            parameter.zero_()
        scores = model(torch.ones(2, *input_shape))
    model.train(was_training)
    for hook in hooks:
        hook.remove()
    sees_zeros = bool(called) and called[-1][1]  # then a layer before it is the same one, or shares its weights
    if last is None or scores.any() or sees_zeros:
        raise SettingsError(f"zero_last_layer: {name} does not end with a dense layer of its own: leave it out")
