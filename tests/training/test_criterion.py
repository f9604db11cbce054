"""Modes of Opacus: which return the criterion, and that its loss gives the gradients that Opacus' gives."""

import inspect

import pytest
import torch
from tests.support.opacus_runs import N, private_run, records, train
from tests.support.privacy_checks import noise_off
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from spectral_dp import PrivacyEngine, RehearsalError
from spectral_dp.training.criterion import PrivateCriterion

opacus = pytest.importorskip("opacus")

WEIGHT = torch.tensor([0.1, 1.0, 5.0])


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew", "no_op", "ghost"])
def test_as_many_values_as_opacus_returns(mode):
    ours, theirs = (private_run(library, grad_sample_mode=mode) for library in ("spectral_dp", "opacus"))
    assert len(ours) == len(theirs) == (5 if mode == "ghost" else 4)
    _, model, optimizer, *criterion, loader = ours
    train(model, optimizer, loader, *criterion)
    assert optimizer.steps == len(loader)


def test_with_a_budget_too():
    model = nn.Linear(4, 3)
    model, optimizer, criterion, loader = PrivacyEngine().make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(records(), batch_size=16),
        criterion=nn.CrossEntropyLoss(),
        target_epsilon=3.0,
        target_delta=1e-3,
        epochs=1,
        max_grad_norm=1.0,
        grad_sample_mode="ghost",
    )
    train(model, optimizer, loader, criterion)


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("ghosts", r"unknown grad_sample_mode 'ghosts': choose one of 'hooks', 'functorch', 'ew', 'no_op', 'ghost'"),
        ("ghost_fsdp", "several devices.*use 'ghost' on one device"),
        ("ghost_tp", "several devices"),
    ],
)
def test_other_modes_are_refused_and_the_run_before_goes_on(mode, message):
    engine, model, optimizer, loader = private_run()
    with pytest.raises(ValueError, match=message):
        private_run(engine=engine, grad_sample_mode=mode)
    train(model, optimizer, loader)
    assert len(engine.accountant) == len(loader)


def test_the_arguments_of_opacus_are_all_spelled_out():
    for name in ("make_private", "make_private_with_epsilon"):
        ours, theirs = (inspect.signature(getattr(e, name)).parameters for e in (PrivacyEngine, opacus.PrivacyEngine))
        assert set(theirs) - {"kwargs"} <= set(ours)
        assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for n, p in ours.items() if n != "self")
    own = {"target_epsilon", "target_delta", "epochs", "stop_at_budget", "other_releases"}
    with_epsilon = set(inspect.signature(PrivacyEngine.make_private_with_epsilon).parameters)
    assert with_epsilon - own == set(inspect.signature(PrivacyEngine.make_private).parameters) - {"noise_multiplier"}


def released(library, criterion, reduction, x, y):
    """The gradient of one step over all records, without noise, clipped where it is long."""
    _, model, optimizer, criterion, loader = private_run(
        library,
        criterion=criterion,
        loss_reduction=reduction,
        grad_sample_mode="ghost",
        max_grad_norm=0.7,
        noise_multiplier=1.0 if library == "spectral_dp" else 0.0,
        batch=N,
        **({"rehearsal": False} if library == "spectral_dp" else {}),
    )
    if library == "spectral_dp":
        optimizer.noise = noise_off()
    (x, y) = next(iter(loader))
    assert len(x) == N, "rate 1 takes all records"
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
    gradients = torch.cat([p.grad.flatten() for p in model.parameters()])
    return loss.item(), gradients * (1 if reduction == "mean" or library == "opacus" else N)


@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize("weight", [None, WEIGHT], ids=["plain", "class weights"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_same_loss_and_gradient_as_ghost_clipping_of_opacus(reduction, weight):
    x, y = records().tensors
    ours, theirs = (
        released(library, nn.CrossEntropyLoss(weight=weight, reduction=reduction), reduction, x, y)
        for library in ("spectral_dp", "opacus")
    )
    assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("ignore_index", [-100, 1])
def test_sequences_are_reduced_as_in_opacus(reduction, ignore_index):
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    logits, labels = torch.randn(5 * 7, 3), torch.randint(3, (5 * 7,))
    criterion = nn.CrossEntropyLoss(reduction=reduction, ignore_index=ignore_index)
    named = type("Named", (), {"loss_reduction": reduction})()
    theirs = DPLossFastGradientClipping(named, named, criterion, reduction)(logits, labels, shape=(5, 7, 3))
    for args, kwargs in (((logits, labels), {}), ((logits,), {"target": labels})):
        ours = PrivateCriterion(criterion, reduction)(*args, shape=(5, 7, 3), **kwargs)
        assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)
    assert criterion.reduction == reduction


class TestRecordsDoNotMeet:
    """Class weights and ignored labels: a mean of torch's divides by what the whole batch holds, this one does not."""

    @staticmethod
    def run(loss, **options):
        _, model, optimizer, *own, loader = private_run(**options)
        train(model, optimizer, loader, *(own or [loss]))

    @pytest.mark.parametrize("options", [{"weight": WEIGHT}, {"ignore_index": 1}], ids=["weights", "ignored"])
    def test_the_rehearsal_finds_nothing(self, options):
        self.run(None, criterion=nn.CrossEntropyLoss(**options), grad_sample_mode="ghost")

    @pytest.mark.parametrize("options", [{"weight": WEIGHT}, {"ignore_index": 1}], ids=["weights", "ignored"])
    def test_negative_control_the_criterion_itself_couples_them(self, options):
        with pytest.raises(RehearsalError):
            self.run(nn.CrossEntropyLoss(**options))


def test_a_function_may_return_the_losses_or_their_mean():
    losses = torch.randn(4, 3, requires_grad=True), torch.randint(3, (4,))
    each = PrivateCriterion(lambda x, y: F.cross_entropy(x, y, reduction="none"), "mean")(*losses)
    mean = PrivateCriterion(F.cross_entropy, "mean")(*losses)
    assert each.ndim == mean.ndim == 0
    torch.testing.assert_close(each, mean)


def test_without_a_criterion_it_is_the_cross_entropy():
    *_, criterion, _ = private_run(grad_sample_mode="ghost", loss_reduction="sum")
    x, y = torch.randn(4, 3), torch.randint(3, (4,))
    torch.testing.assert_close(criterion(x, y), F.cross_entropy(x, y, reduction="sum"))


def test_another_reduction_than_announced_is_refused():
    with pytest.raises(ValueError, match=r"reduction='sum', but loss_reduction='mean': give both the same"):
        private_run(grad_sample_mode="ghost", criterion=nn.CrossEntropyLoss(reduction="sum"))


@pytest.mark.parametrize("form", ["flattened", "classes second"])
def test_a_sequence_counts_the_same_beside_a_longer_one(form):
    """Divided by the width of the batch, one long record would shorten the gradients of all others."""
    criterion = PrivateCriterion(nn.CrossEntropyLoss(), "mean")
    output, target = torch.randn(1, 3, 4, requires_grad=True), torch.tensor([[0, 1, -100]])

    def gradient(width):
        padded = F.pad(output, (0, 0, 0, width - 3)), F.pad(target, (0, width - 3), value=-100)
        if form == "flattened":
            loss = criterion(padded[0].flatten(0, 1), padded[1].flatten(), shape=padded[1].shape)
        else:
            loss = criterion(padded[0].mT, padded[1])
        return torch.autograd.grad(loss, output)[0]

    alone = torch.autograd.grad(F.cross_entropy(output[0], target[0]), output)[0]
    torch.testing.assert_close(gradient(3), alone)
    torch.testing.assert_close(gradient(30), alone)
