"""Training loops that make records meet, and loops that do not: model, loss, and what make_private is told."""

import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, TensorDataset

from spectral_dp import PrivacyEngine

N = 200


def images():
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(N, 1, 6, 6, generator=generator), torch.arange(N) % 3)


def texts():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 30, (N,), generator=generator).tolist()
    return [(torch.randint(1, 50, (n,), generator=generator), n % 3) for n in lengths]


def padded(records):
    return pad_sequence([x for x, _ in records], batch_first=True), torch.tensor([y for _, y in records])


def next_tokens(records):
    rows = [x for x, _ in records]
    return pad_sequence(rows, batch_first=True), pad_sequence(rows, batch_first=True, padding_value=-100)


def cnn(*between):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), *between, nn.Flatten(), nn.Linear(64, 3))


class Apply(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(36, 16), nn.Linear(16, 3)

    def forward(self, x):
        return self.between(self.first(x.flatten(1)))


class Centred(TwoLayers):
    def between(self, h):
        return self.second(torch.relu(h - h.mean(0)))


class Sorted(TwoLayers):
    def between(self, h):
        order = h.sum(1).argsort()
        return self.second(torch.relu(h)[order])[order.argsort()]


class TimeFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.second(self.first(x[:, 0].transpose(0, 1)).mean(0))


class Text(nn.Module):
    def __init__(self, masked):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.hidden, self.out = nn.Embedding(50, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.masked = masked

    def forward(self, x):
        h = torch.tanh(self.hidden(self.embedding(x)))
        mask = (x > 0)[..., None]
        return self.out((h * mask).sum(1) / mask.sum(1) if self.masked else h.mean(1))


class TextWithDropout(Text):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.1, training=self.training)


class TextWithoutPadding(nn.Module):
    """Dropout of the tokens alone: which numbers a record is given depends on how long the others are."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.dropout, self.out = nn.Embedding(50, 8), nn.Dropout(0.2), nn.Linear(8, 3)

    def forward(self, x):
        mask, tokens = x > 0, self.embedding(x)
        h = torch.zeros_like(tokens)
        h[mask] = self.dropout(tokens[mask])
        return self.out(h.sum(1) / mask.sum(1, keepdim=True))


class Experts(nn.Module):
    """Two experts, each of which takes at most so many records, first come first served."""

    def __init__(self, capacity):
        super().__init__()
        torch.manual_seed(0)
        self.router, self.left, self.right = nn.Linear(36, 2), nn.Linear(36, 3), nn.Linear(36, 3)
        self.capacity = capacity

    def forward(self, x):
        x = x.flatten(1)
        gates = self.router(x).softmax(1)
        chosen = F.one_hot(gates.argmax(1), 2)
        gates = gates * chosen * (chosen.cumsum(0) <= self.capacity(len(x)))
        return gates[:, :1] * self.left(x) + gates[:, 1:] * self.right(x)


class NormOfTheBatch(nn.Module):
    def forward(self, x):
        return F.batch_norm(x, None, None, training=True) if self.training else x


class TokenModel(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.out = nn.Embedding(50, 8), nn.Linear(8, 50)

    def forward(self, x):
        return self.out(self.embedding(x)).flatten(0, 1)


def minibatch_deviation(x):
    return x + 0.3 * x.std(0).mean()


def mean_loss(model, x, y):
    return F.cross_entropy(model(x), y.flatten())


def sum_loss(model, x, y):
    return F.cross_entropy(model(x), y.flatten(), reduction="sum")


def noisy(loss):
    """Augmentation in the loop, which no mode of the model can silence."""
    return lambda model, x, y: loss(model, x + 0.3 * torch.randn_like(x), y)


def noisy_by_place(model, x, y):
    """Augmentation from a generator that begins anew at every step: the first row always gets the same."""
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(7))
    return mean_loss(model, x + 0.3 * noise, y)


def mixed_if(says_so):
    """Records are mixed in some batches and not in others."""

    def loss(model, x, y):
        if says_so():
            x = 0.6 * x + 0.4 * x[torch.randperm(len(x))]
        return mean_loss(model, x, y)

    return loss


def in_training_mode(model, x, y):
    model.train()
    return mean_loss(model, x, y)


def views(repeat, *, noise=0.0):
    def loss(model, x, y):
        x = repeat(x)
        return mean_loss(model, x + noise * torch.randn_like(x), repeat(y))

    return loss


def interleaved(t):
    return t.repeat_interleave(4, 0)


def repeated(t):
    return t.repeat(4, *[1] * (t.ndim - 1))


VIEWS = {"augmentation_multiplicity": 4}
TEXT = {"data": texts, "collate_fn": padded}
TOKENS = {"data": texts, "collate_fn": next_tokens}

# name: model, loss, what an error says, options
COUPLED = {
    "views repeated in the wrong order": (cnn, views(repeated), "repeat_interleave", VIEWS),
    "the same with random views": (cnn, views(repeated, noise=0.3), "repeat_interleave", VIEWS),
    "minibatch standard deviation": (lambda: cnn(Apply(minibatch_deviation)), mean_loss, r"2 \(Apply\) gives", {}),
    "the same beside dropout": (
        lambda: cnn(Apply(minibatch_deviation), nn.Dropout()),
        mean_loss,
        r"2 \(Apply\) gives",
        {},
    ),
    "F.batch_norm": (
        lambda: cnn(Apply(lambda x: F.batch_norm(x, None, None, training=True))),
        mean_loss,
        r"2 \(Apply\) gives",
        {},
    ),
    "a weak mean": (lambda: cnn(Apply(lambda x: x - 0.002 * x.mean(0))), mean_loss, r"2 \(Apply\) gives", {}),
    "the norm of the batch, in training only, beside dropout": (
        lambda: cnn(NormOfTheBatch(), nn.Dropout()),
        mean_loss,
        r"2 \(NormOfTheBatch\) gives",
        {},
    ),
    "experts of a quarter of the batch": (lambda: Experts(lambda n: -(-n // 4)), mean_loss, "one by one", {}),
    "x - x.mean(0)": (Centred, mean_loss, r"reaches second \(Linear\)", {}),
    "rows sorted between two layers": (Sorted, mean_loss, r"reaches second \(Linear\)", {}),
    "statistics before the model": (cnn, lambda m, x, y: mean_loss(m, x - x.mean(0), y), "feeds into the model", {}),
    "padding that takes part": (lambda: Text(False), mean_loss, r"reaches out \(Linear\)", TEXT),
    "the same, in a loop that calls model.train()": (
        lambda: TextWithDropout(False),
        in_training_mode,
        r"reaches out \(Linear\)",
        TEXT,
    ),
    **{
        f"records mixed now and then, {name}": (make, mixed_if(says_so), "one by one", {})
        for name, make, says_so in (
            ("torch", cnn, lambda: torch.rand(()) < 0.5),
            ("torch, the reverse", cnn, lambda: torch.rand(()) > 0.5),
            ("numpy", cnn, lambda: np.random.rand() < 0.5),  # noqa: NPY002
            ("python", cnn, lambda: random.random() < 0.5),
            ("python, the reverse, beside dropout", lambda: cnn(nn.Dropout()), lambda: random.random() > 0.5),
        )
    },
    "a mean over labels that are not ignored": (TokenModel, mean_loss, "it is the loss", TOKENS),
    "class weights": (
        cnn,
        lambda m, x, y: F.cross_entropy(m(x), y, weight=torch.tensor([1.0, 5.0, 0.1])),
        "it is the loss",
        {},
    ),
    "a contrastive loss": (
        cnn,
        lambda m, x, y: (lambda z: F.cross_entropy(z @ z.T, torch.arange(len(z))))(F.normalize(m(x))),
        "it is the loss",
        {},
    ),
    "a sum where a mean was announced": (cnn, sum_loss, "loss is a sum", {}),
    "a mean where a sum was announced": (cnn, mean_loss, "loss is a mean", {"loss_reduction": "sum"}),
    "the same beside dropout, sum": (lambda: cnn(nn.Dropout()), sum_loss, "loss is a sum", {}),
    "the same beside random input, sum": (cnn, noisy(sum_loss), "loss is a sum", {}),
    "the same beside random input, mean": (cnn, noisy(mean_loss), "loss is a mean", {"loss_reduction": "sum"}),
}


class Counting(nn.Module):
    """A temperature that depends on the number of calls."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(36, 3), 0

    def forward(self, x):
        self.calls += 1
        return self.linear(x.flatten(1)) * (1 + self.calls / 100)


class Caching(nn.Module):
    """A mask that is made when it is first needed, and a kernel that is computed from the weights at every call."""

    def __init__(self):
        super().__init__()
        self.linear, self.mask = nn.Linear(36, 3), None

    def forward(self, x):
        if self.mask is None:
            self.mask = torch.ones(36)
        self.kernel = self.linear.weight.detach() * 2
        return self.linear(x.flatten(1) * self.mask)


def sure_of_everything():
    """As trained for long: what is left of most gradients is rounding."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 64), nn.ReLU(), nn.Linear(64, 3))
    with torch.no_grad():
        model[3].weight *= 150
    return model


def of_the_largest(model, x, y):
    """Labels that the model would give, so that nearly every gradient is next to nothing."""
    scores = model(x)
    return F.cross_entropy(scores, scores.detach().argmax(1))


def in_halves(model, x, y):
    sum_loss(model, x[::2], y[::2]).backward()
    return sum_loss(model, x[1::2], y[1::2])


def growing_weight():
    calls = [0]

    def loss(model, x, y):
        calls[0] += 1
        return mean_loss(model, x, y) * (1 + calls[0] / 100)

    return loss


INDEPENDENT = {
    "plain": (cnn, mean_loss, {}),
    "a model that is sure of everything": (sure_of_everything, of_the_largest, {}),
    "sum": (cnn, sum_loss, {"loss_reduction": "sum"}),
    "dropout": (lambda: cnn(nn.Dropout(0.5)), mean_loss, {}),
    "dropout that evaluation does not silence": (lambda: cnn(Apply(lambda x: F.dropout(x, 0.3))), mean_loss, {}),
    "noise in the model": (lambda: cnn(Apply(lambda x: x + torch.randn_like(x))), mean_loss, {}),
    "noise in the loop": (cnn, noisy(mean_loss), {}),
    "noise in the loop, by place": (cnn, noisy_by_place, {}),
    "views": (cnn, views(interleaved), VIEWS),
    "random views": (cnn, views(interleaved, noise=0.3), VIEWS),
    "group norm": (lambda: cnn(nn.GroupNorm(2, 4)), mean_loss, {}),
    "masked padding": (lambda: Text(True), mean_loss, TEXT),
    "masked padding in a loop that calls model.train()": (lambda: TextWithDropout(True), in_training_mode, TEXT),
    "dropout of all but padding": (TextWithoutPadding, mean_loss, TEXT),
    "experts for all": (lambda: Experts(lambda n: n), mean_loss, {}),
    "a sum over labels that are not ignored": (TokenModel, sum_loss, TOKENS | {"loss_reduction": "sum"}),
    "parts of a batch": (cnn, in_halves, {"loss_reduction": "sum"}),
    "a model that counts its calls": (Counting, mean_loss, {}),
    "a model that caches what does not depend on the data": (Caching, mean_loss, {}),
    "a loss that grows with the steps": (cnn, growing_weight(), {}),
    "physical batches of two": (cnn, mean_loss, {"max_physical_batch_size": 2}),
    "physical batches of one": (cnn, mean_loss, {"max_physical_batch_size": 1}),
    "bfloat16": (
        lambda: cnn().bfloat16(),
        lambda m, x, y: F.cross_entropy(m(x.bfloat16()).float(), y),
        {},
    ),
    "small batches, some empty": (cnn, mean_loss, {"batch_size": 2, "data": lambda: images()}),
    "double precision": (lambda: cnn().double(), lambda m, x, y: mean_loss(m, x.double(), y), {}),
}


def private(make_model, *, data=images, batch_size=32, collate_fn=None, engine=None, lr=0.1, **options):
    model = make_model()
    engine = engine or PrivacyEngine(seed=0, reproducibility_over_privacy=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    options = {"noise_multiplier": 1.0, "max_grad_norm": 1.0} | options
    loader = DataLoader(data(), batch_size=batch_size, collate_fn=collate_fn)
    return engine, *engine.make_private(module=model, optimizer=optimizer, data_loader=loader, **options)


def train(model, optimizer, loader, loss=mean_loss):
    """Returns how many batches were rehearsals."""
    rehearsed = 0
    for x, y in loader:
        optimizer.zero_grad()
        loss(model, x, y).backward()
        optimizer.step()
        rehearsed += loader.current.is_rehearsal
    return rehearsed
