"""Checks whether a model can be trained privately, under the same name as in Opacus."""

from __future__ import annotations

from torch import nn

from spectral_dp.gradients import compatibility


class ModuleValidator:
    """Finds modules that mix samples, and replaces them.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    >>> ModuleValidator.is_valid(model)
    False
    >>> type(ModuleValidator.fix(model)[1]).__name__
    'GroupNorm'
    """

    @staticmethod
    def validate(module: nn.Module, *, strict: bool = False) -> list[ValueError]:
        """Returns one error for each module that mixes samples.

        A model in evaluation mode is an error, too, because BatchNorm mixes samples in training mode only.

        Args:
            module: The model.
            strict: Whether to raise one ``ValueError`` that lists all errors, if there are any.
        """
        problems = compatibility.find_problems(module)
        if not module.training:
            problems.insert(0, "the model is in evaluation mode: call model.train() first, and see what it does then")
        if strict and problems:
            raise ValueError("the model cannot be trained privately:\n  - " + "\n  - ".join(problems))
        return [ValueError(problem) for problem in problems]

    @classmethod
    def is_valid(cls, module: nn.Module) -> bool:
        """Returns whether :meth:`validate` finds no error."""
        return not cls.validate(module)

    @staticmethod
    def fix(module: nn.Module) -> nn.Module:
        """Returns a copy of the model with GroupNorm for BatchNorm, and InstanceNorm without running statistics."""
        return compatibility.fix(module)

    @classmethod
    def fix_and_validate(cls, module: nn.Module) -> nn.Module:
        """Returns :meth:`fix` of the model. Raises ``ValueError`` if it still has errors."""
        fixed = cls.fix(module)
        cls.validate(fixed, strict=True)
        return fixed
