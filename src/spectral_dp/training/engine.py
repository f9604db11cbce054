"""PrivacyEngine, the entry point: makes a model, an optimizer and a data loader private (Algorithm 4 of the paper).

Names, arguments and return values are those of Opacus, so that only the import of a training script changes. This file
only puts the parts together. Each part has a file of its own: sampling, per-sample gradients, clipping, mechanism,
accounting, checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, Unpack, overload

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset, default_collate

from spectral_dp import accounting
from spectral_dp.accounting import Accountant, Ledger, Phase
from spectral_dp.accounting.budget import Budget, EngineAccountant
from spectral_dp.gradients import ModelGradients, find_problems, fix
from spectral_dp.mechanism.clipping import Clipping, ClippingName, clipping_policy
from spectral_dp.mechanism.noise import NoiseSource, SecureNoise, SeededNoise
from spectral_dp.relations import Relation
from spectral_dp.training.bookkeeping import Bookkeeping
from spectral_dp.training.coins import Coins, SecureCoins, SeededCoins
from spectral_dp.training.compatibility import check_criterion, require_compatible
from spectral_dp.training.config import SpectralConfig
from spectral_dp.training.criterion import GhostMode, PlainMode, PrivateCriterion, check_mode
from spectral_dp.training.distributed.joining import release_facts, share_ledger, share_model, stop_together
from spectral_dp.training.distributed.ranks import Ranks, current_ranks, of_first
from spectral_dp.training.distributed.same_records import require_same_records
from spectral_dp.training.distributed.shard import ShardCoins
from spectral_dp.training.distributed.shares import RankNoise, SharedNoise, add_noise_alone
from spectral_dp.training.engine_checkpoints import EngineCheckpoints
from spectral_dp.training.loaders import private_loader
from spectral_dp.training.optimizer import LossReduction, PrivateOptimizer
from spectral_dp.training.options import BudgetOptions, PrivateOptions, with_arguments_of
from spectral_dp.training.rehearsal import Rehearsal
from spectral_dp.training.run import Run
from spectral_dp.training.sampling import CountingLoader, PoissonLoader

PrivateLoader: TypeAlias = PoissonLoader | CountingLoader
PrivateParts: TypeAlias = tuple[nn.Module, PrivateOptimizer, PrivateLoader]
GhostParts: TypeAlias = tuple[nn.Module, PrivateOptimizer, PrivateCriterion, PrivateLoader]


class PrivacyEngine(EngineCheckpoints):
    """Makes training private and keeps the ledger of its steps.

    Formal guarantee. Training with the objects that :meth:`make_private` returns is
    ``(get_epsilon(δ), δ)``-differentially private:

    * What is protected: all models that training passes through, released together.
    * For which neighbours: data sets that differ in one record of the data loader, as ``relation`` says.
    * Under which assumptions: those of ``docs/privacy.md``, and no ``seed``. The ledger lists the steps that were run.

    Args:
        accountant: ``"pld"``, which is tight, or ``"rdp"``. Opacus' name ``"prv"`` means ``"pld"``.
        secure_mode: Accepted because Opacus has it. Noise and batches always come from a cryptographic generator.
        relation: Which data sets are neighbours.
        seed: A seed that makes noise and batches reproducible, for experiments. It needs
            ``reproducibility_over_privacy=True``.
        reproducibility_over_privacy: Confirms that the run may be predictable, so that it protects nobody.
    """

    def __init__(
        self,
        *,
        accountant: Accountant | Literal["prv"] = "pld",
        secure_mode: bool = True,
        relation: Relation = Relation.ADD_OR_REMOVE_ONE,
        seed: int | None = None,
        reproducibility_over_privacy: bool = False,
    ) -> None:
        self.accountant = EngineAccountant("pld" if accountant == "prv" else accountant, Ledger(relation))
        self._relation = Relation(relation)
        self._noise: NoiseSource = SecureNoise()
        self._coins: Coins = SecureCoins()
        if seed is not None:
            self._noise = SeededNoise(seed, reproducibility_over_privacy=reproducibility_over_privacy)
            self._coins = SeededCoins(seed, reproducibility_over_privacy=reproducibility_over_privacy)
        self._budget: Budget | None = None  # of all runs, also after a make_private that failed

    @overload
    def make_private(
        self, *, noise_multiplier: float, grad_sample_mode: PlainMode = ..., **options: Unpack[PrivateOptions]
    ) -> PrivateParts: ...

    @overload
    def make_private(
        self, *, noise_multiplier: float, grad_sample_mode: GhostMode, **options: Unpack[PrivateOptions]
    ) -> GhostParts: ...

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: DataLoader[Any],
        noise_multiplier: float,
        max_grad_norm: float | Sequence[float],
        criterion: Callable[..., Tensor] | None = None,
        batch_first: bool = True,
        loss_reduction: LossReduction = "mean",
        poisson_sampling: bool = True,
        clipping: ClippingName | Clipping = "flat",
        noise_allocation: Literal["uniform", "optimal"] = "uniform",
        spectral: SpectralConfig | None = None,
        max_physical_batch_size: int | None = None,
        augmentation_multiplicity: int = 1,
        sample_rate: float | None = None,
        rehearsal: bool = True,
        noise_generator: None = None,
        grad_sample_mode: PlainMode | GhostMode = "hooks",
        wrap_model: bool = True,
        rand_on_empty: bool = False,
    ) -> PrivateParts | GhostParts:
        """Makes a model, an optimizer and a data loader private.

        If ``torch.distributed.init_process_group`` was called before, all processes of the group train together: each
        calls this with the same arguments, rank 0 gives its parameters to the others, and each gets the batches of its
        shard of the records. The batch size is still that of the whole run (see ``docs/distributed.md``).

        Args:
            module: The model. It must treat samples independently.
            optimizer: Any ``torch.optim`` optimizer over the parameters of the model.
            data_loader: The loader whose dataset, batch size (the expected one), collation and workers are used.
            noise_multiplier: ``σ``, the deviation of the noise in units of the sensitivity.
            max_grad_norm: ``C``, the bound on the norm of a sample's gradient. With ``clipping="per_layer"`` it can
                be a list of bounds ``C_l``, one for each layer.
            criterion: The loss function. If given, it is checked. The loss must be the sum, or the plain mean, of terms
                that depend on one sample each. Weighted means, and means over the labels that are not ignored, are
                not: they divide by a number that depends on *other* samples.
            batch_first: Must be true: the first dimension numbers the samples.
            loss_reduction: How the loss combines the samples: ``"mean"`` or ``"sum"``.
            poisson_sampling: Whether to draw Poisson batches from the loader's dataset. If false, the loader's own
                batches are used. Their order must then not depend on the contents of the records, and ``sample_rate``
                must be given.
            clipping: ``"flat"``, ``"per_layer"``, ``"automatic"``, or a ``Clipping`` object.
            noise_allocation: How ``"per_layer"`` clipping distributes the noise: ``"uniform"``, or ``"optimal"``,
                which is the least noise in total.
            spectral: What is released of each layer. By default nothing is filtered, which is plain DP-SGD.
            max_physical_batch_size: The largest number of samples in memory at once. It does not change the release.
            augmentation_multiplicity: The number of views of each sample, which lie next to each other in the batch.
            sample_rate: Only with ``poisson_sampling=False``. It must then be 1, and the engine's relation must be
                replace-one, because nothing better holds for a loader that takes the data in order or shuffled.
            rehearsal: Whether to begin the first epoch with a few small batches that test whether the training loop
                treats every record independently. If it does not, an error is raised (see ``docs/sharp-edges.md``).
            noise_generator: Must be None, because noise from a generator can be predicted. For experiments, use the
                ``seed`` of the engine.
            grad_sample_mode: One of Opacus' modes. Here they all compute the same.
            wrap_model: Accepted because Opacus has it. It has no effect: models are never wrapped.
            rand_on_empty: Accepted because Opacus has it. It has no effect.

        Returns:
            The private model, optimizer and data loader. The model is ``module`` itself, still an ordinary module.
            With ``grad_sample_mode="ghost"`` model, optimizer, criterion and data loader, as in Opacus; the criterion
            is a :class:`~spectral_dp.training.criterion.PrivateCriterion`, which is safe with class weights and ignored
            labels.

        Raises:
            ValueError: If the model, the loss, the loader or a setting cannot be made private. The message says what
                to change.
            TypeError: If the dataset or the loader is of the wrong kind.
        """
        check_mode(grad_sample_mode)
        loss = PrivateCriterion(criterion, loss_reduction) if grad_sample_mode == "ghost" else None
        if self._run is not None:  # a second call starts another run, on the same ledger and within the same budget
            self._run.optimizer.gradients.remove()
            self._run = None
        if noise_generator is not None:
            raise ValueError(
                "noise from a generator can be predicted: leave noise_generator out, or for an experiment use "
                "PrivacyEngine(seed=..., reproducibility_over_privacy=True)"
            )
        if loss is None:
            check_criterion(criterion, loss_reduction)
        if not batch_first:
            raise ValueError(
                "samples must be numbered by the first dimension: use batch_first=True, and layers likewise"
            )
        self.validate(module=module, optimizer=optimizer, data_loader=data_loader)
        ranks = current_ranks()
        if ranks is not None:
            share_model(ranks, module)
        spectral = spectral or SpectralConfig.dpsgd()
        loader = private_loader(
            data_loader,
            poisson_sampling=poisson_sampling,
            sample_rate=sample_rate,
            relation=self._relation,
            coins=self._coins if ranks is None else ShardCoins(self._coins, ranks.rank, ranks.size),
            max_physical_batch_size=max_physical_batch_size,
        )
        gradients = ModelGradients(module, spectral.layer_configs(module))
        policy = clipping_policy(clipping, max_grad_norm, noise_allocation)
        books = Bookkeeping(self.accountant.ledger, loader.sample_rate, self._budget)
        books.ledger.sign_anew()  # those who shared it in an earlier group may go on without each other

        def facts() -> dict[str, object]:
            return release_facts(gradients.named_parameters, books.ledger, private.steps, private.hyperparameters())

        private = PrivateOptimizer(
            optimizer,
            gradients,
            clipping=policy,
            noise_multiplier=noise_multiplier,
            expected_batch_size=loader.expected_batch_size,
            noise=self._noise if ranks is None or self._noise.is_private else RankNoise(self._noise, ranks.rank),
            loss_reduction=loss_reduction,
            relation=self._relation,
            views=augmentation_multiplicity,
            current_batch=loader.require_current,
            before_release=books.record,
            noisy_sums=add_noise_alone if ranks is None else SharedNoise(ranks, facts),
        )
        gradients.expect(lambda: None if loader.current is None else loader.current.size * augmentation_multiplicity)
        loader.settle = private.require_taken
        if rehearsal and not isinstance(loader.dataset, IterableDataset):
            loader.rehearse = Rehearsal(
                private,
                len(loader.dataset),  # type: ignore[arg-type]
                loader.read,
                loader.collate,
                are_alike=loader.collate_fn is default_collate,
                with_empty_batch=isinstance(loader, PoissonLoader) and loader.may_be_empty,
            ).batches
        self._run, self._ranks = Run(books, private, loader, spectral), ranks
        if ranks is not None:
            self._join(ranks, self._run)
        return (module, private, loader) if loss is None else (module, private, loss, loader)

    @overload
    def make_private_with_epsilon(
        self, *, grad_sample_mode: PlainMode = ..., **options: Unpack[BudgetOptions]
    ) -> PrivateParts: ...

    @overload
    def make_private_with_epsilon(
        self, *, grad_sample_mode: GhostMode, **options: Unpack[BudgetOptions]
    ) -> GhostParts: ...

    @with_arguments_of(make_private, without="noise_multiplier")
    def make_private_with_epsilon(
        self,
        *,
        data_loader: DataLoader[Any],
        target_epsilon: float,
        target_delta: float,
        epochs: float,
        poisson_sampling: bool = True,
        sample_rate: float | None = None,
        stop_at_budget: bool = False,
        other_releases: Sequence[Phase] = (),
        **options: Any,
    ) -> PrivateParts | GhostParts:
        """Does the same as :meth:`make_private`, with the least noise that keeps ``epochs`` epochs within the budget.

        Args:
            data_loader: See :meth:`make_private`.
            target_epsilon: The largest ``ε`` that the planned epochs may spend.
            target_delta: The ``δ`` at which ``ε`` is measured.
            epochs: The number of epochs that are planned; part of an epoch counts by its steps.
            poisson_sampling: See :meth:`make_private`.
            sample_rate: See :meth:`make_private`.
            stop_at_budget: Whether to end the iteration of the data loader when the budget is spent, and to refuse
                steps beyond it. If false, the first step beyond the budget gives a warning. The budget belongs to the
                engine: it also holds for runs that later calls of :meth:`make_private` set up.
            other_releases: Releases of the same records beside training, such as private statistics of them, which are
                to be within the same budget. The noise leaves room for them, and so do steps beyond the plan. Whoever
                makes them enters them in ``engine.accountant.ledger`` after this call, before the release.
            **options: All other arguments of :meth:`make_private`, but for ``noise_multiplier``.

        Returns:
            The same as :meth:`make_private`.

        Raises:
            ValueError: If this engine has made steps already, or for the reasons of :meth:`make_private`.
        """
        if self.accountant.ledger.steps:
            raise ValueError(
                "this engine has spent budget already: use a new engine, or make_private with a noise_multiplier"
            )
        records = len(data_loader.dataset)  # type: ignore[arg-type]
        accounting.warn_if_delta_too_large(target_delta, records)
        loader = private_loader(
            data_loader,
            poisson_sampling=poisson_sampling,
            sample_rate=sample_rate,
            relation=self._relation,
            coins=self._coins,
        )
        rate, steps = loader.sample_rate, math.ceil(round(epochs * len(loader), 6))  # 0.7 of ten are seven

        def calibrated() -> float:
            return accounting.calibrate_noise(
                target_epsilon,
                target_delta,
                rate,
                steps,
                accountant=self.accountant.name,
                relation=self._relation,
                beside=other_releases,
            )

        self._ranks = current_ranks()
        if self._ranks is not None:
            budget = {"target_epsilon": target_epsilon, "target_delta": target_delta, "stop_at_budget": stop_at_budget}
            planned_for = {"sample_rate": rate, "steps": steps, "other_releases": list(other_releases)}
            self._ranks.meet("make_private_with_epsilon", {**budget, **planned_for})
        sigma = of_first(self._ranks, calibrated, "the calibration of the noise")
        make: Callable[..., PrivateParts | GhostParts] = self.make_private
        sampled = {"data_loader": data_loader, "poisson_sampling": poisson_sampling, "sample_rate": sample_rate}
        result = make(noise_multiplier=sigma, **sampled, **options)
        assert self._run is not None
        planned = Phase(sigma, rate, steps)
        self._budget = self._run.books.budget = Budget(
            target_epsilon, target_delta, planned, stop_at_budget, self.accountant.name, other_releases
        )
        return result

    def get_epsilon(self, delta: float) -> float:
        """Returns the ``ε`` that the steps run so far have spent at ``delta``. Warns if ``delta >= 1/N``."""
        if self._run is not None:
            accounting.warn_if_delta_too_large(delta, len(self._run.loader.dataset))  # type: ignore[arg-type]
        return self.accountant.get_epsilon(delta)

    def is_compatible(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer | None = None,
        data_loader: DataLoader[Any] | None = None,
    ) -> bool:
        """Returns whether :meth:`validate` raises no error."""
        try:
            self.validate(module=module, optimizer=optimizer, data_loader=data_loader)
        except (ValueError, TypeError):
            return False
        return True

    def validate(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer | None = None,
        data_loader: DataLoader[Any] | None = None,
    ) -> None:
        """Raises ``ValueError`` or ``TypeError``, with the cause and the fix, if these cannot be made private."""
        require_compatible(module, optimizer, data_loader)

    @staticmethod
    def get_compatible_module(module: nn.Module) -> nn.Module:
        """Returns a copy of the model in which no module mixes samples: BatchNorm is replaced by GroupNorm."""
        fixed = fix(module)
        assert not find_problems(fixed)
        return fixed

    def _join(self, ranks: Ranks, run: Run) -> None:
        """Begins a run together with the other ranks."""
        books, settings = run.books, {**run.settings(), "seed": self._coins.seed, "accountant": self.accountant.name}
        require_same_records(ranks, run.loader.dataset, run.loader.read)
        share_ledger(ranks, books.ledger, settings)
        run.loader.stop_when = stop_together(
            ranks, lambda: books.budget is not None and books.budget.stop, run.must_stop
        )
