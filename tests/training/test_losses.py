"""Losses that people train with, through the engine with noise off: the release is the sum of clipped gradients.

The gradient of a record is taken from the formula of its own loss, written down for one record without the function
that the loop calls; it is clipped and summed by hand. What makes records meet is refused by the rehearsal.
"""

import copy
import math

import pytest
import torch
from tests.support.loops import TokenModel, next_tokens, private, texts
from tests.support.privacy_checks import noise_off
from torch import nn
from torch.nn import functional as F

from spectral_dp import RehearsalError
from spectral_dp.mechanism.clipping import ROUNDING_GUARD

CLASSES, LONGEST = 3, 30
WEIGHT = torch.tensor([1.0, 5.0, 0.1], dtype=torch.float64)
POSITIVE = torch.tensor([2.0, 0.5, 4.0], dtype=torch.float64)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()

    def forward(self, x):
        return self.layers(x)


def tokens():
    return TokenModel().double()


def points():
    """Features; a class, several labels and a weight in one target."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(200, 6, generator=generator, dtype=torch.float64)
    labels = (torch.rand(200, CLASSES, generator=generator) < 0.3).double()
    weights = 0.5 + torch.rand(200, 1, generator=generator).double()
    return [(x[i], torch.cat([torch.tensor([i % CLASSES]).double(), labels[i], weights[i]])) for i in range(200)]


def parts(y):
    """Class, labels and weight of each record."""
    return y[:, 0].long(), y[:, 1:-1], y[:, -1]


POINTS, TOKENS = {"data": points}, {"data": texts, "collate_fn": next_tokens}
SUM = {"loss_reduction": "sum"}


def log_likelihoods(logits, targets, weight=None, smoothing=0.0):
    """``(1 - s) w_y log p_y + s / K sum_k w_k log p_k`` of each row, minus sign apart."""
    log_p = logits - logits.exp().sum(1, keepdim=True).log()
    weight = torch.ones(logits.shape[1], dtype=logits.dtype) if weight is None else weight
    own = weight[targets] * log_p[range(len(targets)), targets]
    return (1 - smoothing) * own + smoothing / logits.shape[1] * (log_p * weight).sum(1)


def counted(logits, y):
    """The rows of a sequence that are not ignored, and their targets."""
    y = y.flatten()
    return logits[y >= 0], y[y >= 0]


def binary(logits, labels, positive=None):
    positive = torch.ones_like(labels) if positive is None else positive
    return -(positive * labels * logits.sigmoid().log() + (1 - labels) * (1 - logits.sigmoid()).log()).sum(1)


def positions(logits, y):
    return F.cross_entropy(logits.unflatten(0, y.shape).mT, y, reduction="none")


def cross_entropy(**options):
    return lambda logits, y: F.cross_entropy(logits, parts(y)[0], **options)


# name: model, the loop's loss of a batch, the loss of one record by its formula, options
LOSSES = {
    "tokens, summed": (
        tokens,
        lambda z, y: F.cross_entropy(z, y.flatten(), reduction="sum"),
        lambda z, y: -log_likelihoods(*counted(z, y)).sum(),
        TOKENS | SUM,
    ),
    "tokens, summed and divided by a constant": (
        tokens,
        lambda z, y: F.cross_entropy(z, y.flatten(), reduction="sum") / LONGEST,
        lambda z, y: -log_likelihoods(*counted(z, y)).sum() / LONGEST,
        TOKENS | SUM,
    ),
    "tokens, the mean of each record's own": (
        tokens,
        lambda z, y: (positions(z, y).sum(1) / (y >= 0).sum(1)).mean(),
        lambda z, y: -log_likelihoods(*counted(z, y)).mean(),
        TOKENS,
    ),
    "tokens, smoothed, some ignored": (
        tokens,
        lambda z, y: F.cross_entropy(z, y.flatten(), ignore_index=-100, label_smoothing=0.1, reduction="sum"),
        lambda z, y: -log_likelihoods(*counted(z, y), smoothing=0.1).sum(),
        TOKENS | SUM,
    ),
    "label smoothing": (
        Classifier,
        cross_entropy(label_smoothing=0.1),
        lambda z, y: -log_likelihoods(z, parts(y)[0], smoothing=0.1).sum(),
        POINTS,
    ),
    "class weights": (
        Classifier,
        cross_entropy(weight=WEIGHT, reduction="sum"),
        lambda z, y: -log_likelihoods(z, parts(y)[0], WEIGHT).sum(),
        POINTS | SUM,
    ),
    "class weights and label smoothing": (
        Classifier,
        cross_entropy(weight=WEIGHT, label_smoothing=0.2, reduction="sum"),
        lambda z, y: -log_likelihoods(z, parts(y)[0], WEIGHT, 0.2).sum(),
        POINTS | SUM,
    ),
    "a class that is ignored": (
        Classifier,
        cross_entropy(ignore_index=1, reduction="sum"),
        lambda z, y: -log_likelihoods(z, parts(y)[0]).sum() * (parts(y)[0] != 1).item(),
        POINTS | SUM,
    ),
    "several labels, summed": (
        Classifier,
        lambda z, y: F.binary_cross_entropy_with_logits(z, parts(y)[1], reduction="sum"),
        lambda z, y: binary(z, parts(y)[1]).sum(),
        POINTS | SUM,
    ),
    "several labels, averaged": (
        Classifier,
        lambda z, y: F.binary_cross_entropy_with_logits(z, parts(y)[1], pos_weight=POSITIVE),
        lambda z, y: binary(z, parts(y)[1], POSITIVE).sum() / CLASSES,
        POINTS,
    ),
    "several losses added": (
        Classifier,
        lambda z, y: F.cross_entropy(z, parts(y)[0]) + 0.3 * F.mse_loss(z, parts(y)[1]) + 0.01 * z.square().mean(),
        lambda z, y: (
            -log_likelihoods(z, parts(y)[0]).sum()
            + 0.3 * (z - parts(y)[1]).square().sum() / CLASSES
            + 0.01 * z.square().sum() / CLASSES
        ),
        POINTS,
    ),
    "weights of single records, summed": (
        Classifier,
        lambda z, y: (F.cross_entropy(z, parts(y)[0], reduction="none") * parts(y)[2]).sum(),
        lambda z, y: -log_likelihoods(z, parts(y)[0]).sum() * parts(y)[2].item(),
        POINTS | SUM,
    ),
    "weights of single records, averaged": (
        Classifier,
        lambda z, y: (F.cross_entropy(z, parts(y)[0], reduction="none") * parts(y)[2]).mean(),
        lambda z, y: -log_likelihoods(z, parts(y)[0]).sum() * parts(y)[2].item(),
        POINTS,
    ),
    "a divergence from soft labels": (
        Classifier,
        lambda z, y: F.kl_div(z.log_softmax(1), (1 + parts(y)[1]).softmax(1), reduction="batchmean"),
        lambda z, y: ((1 + parts(y)[1]).softmax(1) * ((1 + parts(y)[1]).log_softmax(1) - z.log_softmax(1))).sum(),
        POINTS,
    ),
    "focal": (
        Classifier,
        lambda z, y: (
            lambda loss: ((1 - (-loss).exp()) ** 2 * loss).mean()
        )(F.cross_entropy(z, parts(y)[0], reduction="none")),
        lambda z, y: (lambda log_p: -((1 - log_p.exp()) ** 2) * log_p)(log_likelihoods(z, parts(y)[0])).sum(),
        POINTS,
    ),
}  # fmt: skip


def released(make, loss, options, bound):
    """The sum that one step releases, and the batch it is of."""
    _, model, optimizer, loader = private(make, lr=0.0, max_grad_norm=bound, **options)
    optimizer.noise = noise_off()
    for x, y in loader:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
        if not loader.current.is_rehearsal:
            total = torch.cat([p.grad.flatten() for p in model.parameters()]) * loader.expected_batch_size
            return total, copy.deepcopy(model), x, y  # a copy is not watched
    raise AssertionError("the loader ended with the rehearsal")


def clipped_sum(model, x, y, loss_of_record, bound):
    """By hand, and the norms of the records."""
    total, norms = 0.0, []
    for b in range(len(x)):
        # A record by itself is not padded.
        length = len(x[b]) if x.is_floating_point() else int((y[b] >= 0).sum())
        loss = loss_of_record(model(x[b : b + 1, :length]), y[b : b + 1, :length] if x.ndim == y.ndim else y[b : b + 1])
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
        norms.append(gradient.norm().item())
        total = total + gradient * (bound / norms[-1] if norms[-1] > bound else 1.0)
    return total, norms


@pytest.mark.parametrize(("make", "loss", "of_record", "options"), LOSSES.values(), ids=LOSSES)
def test_the_release_is_the_sum_of_clipped_gradients(make, loss, of_record, options):
    """Without a bound, and with one that clips some records and not others."""
    _, model, x, y = released(make, loss, options, bound=1e6)
    norms = sorted(clipped_sum(model, x, y, of_record, math.inf)[1])
    for bound in (1e6, norms[len(norms) // 2]):
        total, model, x, y = released(make, loss, options, bound)
        expected, norms_now = clipped_sum(model, x, y, of_record, bound)
        clipped = [min(norm, bound) for norm in norms_now if norm > bound]
        assert bound == 1e6 or 0 < len(clipped) < len(norms_now)
        rounding = 1e-9 * float(expected.norm()) + 1.1 * ROUNDING_GUARD * sum(clipped)
        assert float((total - expected).norm()) < rounding


# name: model, loss, what the error says, options
MEETING = {
    "tokens, averaged over those of the batch that count": (
        tokens, lambda z, y: F.cross_entropy(z, y.flatten()), "it is the loss", TOKENS,
    ),
    "the same, smoothed": (
        tokens, lambda z, y: F.cross_entropy(z, y.flatten(), label_smoothing=0.1), "it is the loss", TOKENS,
    ),
    "the same, summed and divided by their number": (
        tokens,
        lambda z, y: F.cross_entropy(z, y.flatten(), reduction="sum") / (y >= 0).sum(),
        "it is the loss",
        TOKENS | SUM,
    ),
    "tokens, averaged over the padded length": (
        tokens, lambda z, y: positions(z, y).mean(1).sum(), "it is the loss", TOKENS | SUM,
    ),
    "class weights, averaged": (Classifier, cross_entropy(weight=WEIGHT), "it is the loss", POINTS),
    "a class that is ignored, averaged": (
        Classifier,
        cross_entropy(ignore_index=1),
        "it is the loss|the loss is a sum",  # which it is, in small batches that hold no more than one other record
        POINTS,
    ),
    "weights of single records over their sum": (
        Classifier,
        lambda z, y: (F.cross_entropy(z, parts(y)[0], reduction="none") * parts(y)[2]).sum() / parts(y)[2].sum(),
        "it is the loss",
        POINTS,
    ),
    "several labels over the number of positives": (
        Classifier,
        lambda z, y: F.binary_cross_entropy_with_logits(z, parts(y)[1], reduction="sum") / (1 + parts(y)[1].sum()),
        "it is the loss",
        POINTS | SUM,
    ),
    "the hardest half of the batch": (
        Classifier,
        lambda z, y: F.cross_entropy(z, parts(y)[0], reduction="none").topk((len(y) + 1) // 2)[0].mean(),
        "one by one|number or length",
        POINTS,
    ),
    "the entropy of the average prediction": (
        Classifier,
        lambda z, y: F.cross_entropy(z, parts(y)[0]) + (lambda p: (p * p.log()).sum())(z.softmax(1).mean(0)),
        "it is the loss",
        POINTS,
    ),
    "a mean and a sum added": (
        Classifier,
        lambda z, y: F.cross_entropy(z, parts(y)[0]) + F.mse_loss(z, parts(y)[1], reduction="sum"),
        "it is the loss",
        POINTS,
    ),
    "pairs of records": (
        Classifier,
        lambda z, y: F.cross_entropy(z, parts(y)[0]) + 0.1 * (z - z.roll(1, 0)).square().mean(),
        "it is the loss",
        POINTS,
    ),
    "the root of the mean square": (
        Classifier, lambda z, y: F.mse_loss(z, parts(y)[1]).sqrt(), "it is the loss", POINTS,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("make", "loss", "message", "options"), MEETING.values(), ids=MEETING)
def test_losses_that_make_records_meet_are_refused(make, loss, message, options):
    with pytest.raises(RehearsalError, match=message):
        released(make, loss, options, bound=1.0)


def test_a_penalty_on_the_weights_is_refused():
    """Its gradient would be released without noise, once for each batch."""
    _, model, optimizer, loader = private(Classifier, **POINTS)
    for x, y in loader:
        penalty = 0.01 * sum(p.square().sum() for p in model.parameters())
        (F.cross_entropy(model(x), parts(y)[0]) + penalty).backward()
        with pytest.raises(RuntimeError, match="weight_decay"):
            optimizer.step()
        break
