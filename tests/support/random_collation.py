"""Collations that draw as many random numbers as their records are long: alone, and together with a coupling."""

import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from tests.support.loops import Text


def texts(seed, *, size=200, longest=30):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, longest, (size,), generator=generator).tolist()
    labels = torch.randint(3, (size,), generator=generator).tolist()
    return [(torch.randint(2, 50, (n,), generator=generator), y) for n, y in zip(lengths, labels, strict=True)]


def documents(seed):
    """Of which hardly two are of one length."""
    return texts(seed, size=600, longest=1000)


def sentences(seed):
    return [(" ".join(f"word{'s' * (int(t) % 4)}{int(t)}" for t in x), y) for x, y in texts(seed)]


def sounds(seed):
    """Frames of four numbers, of which there are many or few."""
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(len(x), 4, generator=generator) + 1, y) for x, y in texts(seed)]


def batch_of(rows, records):
    return pad_sequence(rows, batch_first=True), torch.tensor([y for _, y in records])


def dropped(x):
    """Word dropout: every token is replaced with some probability."""
    return torch.where(torch.rand(len(x)) < 0.3, 1, x)


def word_dropout(records):
    return batch_of([dropped(x) for x, _ in records], records)


def word_dropout_of_python(records):
    rows = [torch.tensor([1 if random.random() < 0.3 else int(t) for t in x]) for x, _ in records]
    return batch_of(rows, records)


def words_left_out(records):
    return batch_of([x[np.random.rand(len(x)) < 0.8] if len(x) > 8 else x for x, _ in records], records)  # noqa: NPY002


def crops(records):
    """Of variable length, and then a number for every token of the crop."""
    rows = []
    for x, _ in records:
        length = int(torch.randint(2, len(x) + 1, ()))
        begin = int(torch.randint(0, len(x) - length + 1, ()))
        rows.append(dropped(x[begin : begin + length]))
    return batch_of(rows, records)


def masked_one_by_one(records):
    """As masked language models are trained: some tokens masked, some replaced, the rest kept."""
    rows = []
    for x, _ in records:
        chosen = torch.rand(len(x)) < 0.4
        row = torch.where(chosen & (torch.rand(len(x)) < 0.8), 1, x)
        row[chosen] = torch.where(torch.rand(int(chosen.sum())) < 0.1, torch.randint(2, 50, (int(chosen.sum()),)), 1)
        rows.append(row)
    return batch_of(rows, records)


def masked_all_at_once(records):
    x, y = batch_of([x for x, _ in records], records)
    chosen = torch.bernoulli(torch.full(x.shape, 0.4)).bool() & (x > 0)
    replaced = torch.bernoulli(torch.full(x.shape, 0.5)).bool()
    return torch.where(chosen, torch.where(replaced, torch.randint(2, 50, x.shape), 1), x), y


def swaps(records):
    """As many exchanges of two tokens as chance says, and more in long records."""
    rows = []
    for x, _ in records:
        row = x.tolist()
        while random.random() < 1 - 1 / len(row):
            i, j = random.randrange(len(row)), random.randrange(len(row))
            row[i], row[j] = row[j], row[i]
            row[i] = random.randrange(2, 50)
        rows.append(torch.tensor(row))
    return batch_of(rows, records)


def tokenized(records):
    rows = [torch.tensor([2 + sum(map(ord, word)) % 48 for word in x.split()]) for x, _ in records]
    return batch_of([dropped(row) for row in rows], records)


def labels_first(records):
    """All labels, and then all tokens: a record draws in two places."""
    y = torch.tensor([int(torch.randint(0, 3, ())) if torch.rand(()) < 0.2 else y for _, y in records])
    return batch_of([dropped(x) for x, _ in records], records)[0], y


def shifted(records):
    """One number for every record, however long."""
    return batch_of([2 + (x + int(torch.randint(0, 48, ()))) % 48 for x, _ in records], records)


def frames(records):
    return batch_of([x * (torch.rand(len(x), 1) < 0.7) for x, _ in records], records)


# Couplings.


def cut_and_mixed(records):
    """The end of a record is that of another one."""
    rows = [dropped(x) for x, _ in records]
    partners = torch.randperm(len(rows)).tolist()
    ends = [torch.cat([x[: len(x) // 2], rows[p][len(rows[p]) // 2 :]]) for x, p in zip(rows, partners, strict=True)]
    return batch_of(ends, records)


def mixed_frames(records):
    x, y = frames(records)
    return 0.7 * x + 0.3 * x[torch.randperm(len(x))], y


def mixed_now_and_then(records):
    mixed = torch.rand(()) < 0.5
    x, y = frames(records)
    return (0.7 * x + 0.3 * x.roll(1, 0) if mixed else x), y


def centred_frames(records):
    x, y = frames(records)
    return x - x.mean(0), y


def weakly_centred_frames(records):
    x, y = frames(records)
    return x - 0.01 * x.mean(0), y


def frames_over_deviation(records):
    x, y = frames(records)
    return x / x.std(), y


def rows_moved(records):
    """Sorted by what they hold, and the labels are not."""
    x, y = word_dropout(records)
    return x[x.float().mean(1).argsort()], y


class Frames(nn.Module):
    def __init__(self, masked=True):
        super().__init__()
        torch.manual_seed(0)
        self.hidden, self.out, self.masked = nn.Linear(4, 8), nn.Linear(8, 3), masked

    def forward(self, x):
        h = torch.tanh(self.hidden(x))
        return self.out(h.sum(1) if self.masked else h.mean(1))


class PooledFrames(Frames):
    """Padding is zero, and what is zero after a layer without a bias stays so."""

    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(4, 8, bias=False)


class Tagger(nn.Module):
    """Scores every token, and is trained on those that are there."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.out = nn.Embedding(50, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.out(self.embedding(x))


def of_tokens(reduction):
    def loss(model, x, y):
        targets = torch.where(x > 0, y[:, None], -100)
        return F.cross_entropy(model(x).flatten(0, 1), targets.flatten(), reduction=reduction)

    return loss


def loss_of_records(model, x, y):
    return F.cross_entropy(model(x), y)


def with_noise_by_length(model, x, y):
    """Random numbers in the loop, one for every token that is there."""
    x = x.clone()
    x[x > 0] = torch.where(torch.rand(int((x > 0).sum())) < 0.3, 1, x[x > 0])
    return loss_of_records(model, x, y)


def masked():
    return Text(True)


def with_dropout():
    model = Text(True)
    model.hidden = nn.Sequential(model.hidden, nn.Dropout(0.3))
    return model


# name: data, collation, model, loss, options
ALONE = {
    "word dropout": (texts, word_dropout, masked, loss_of_records, {}),
    "word dropout, python's generator": (texts, word_dropout_of_python, masked, loss_of_records, {}),
    "words left out, numpy's generator": (texts, words_left_out, masked, loss_of_records, {}),
    "word dropout beside dropout": (texts, word_dropout, with_dropout, loss_of_records, {}),
    "word dropout in the loop": (texts, None, masked, with_noise_by_length, {}),
    "word dropout in the collation and in the loop": (texts, word_dropout, masked, with_noise_by_length, {}),
    "word dropout, random labels first": (texts, labels_first, masked, loss_of_records, {}),
    "word dropout of sentences": (sentences, tokenized, masked, loss_of_records, {}),
    "word dropout of long records": (documents, word_dropout, masked, loss_of_records, {}),
    "one number a record, of any length": (documents, shifted, masked, loss_of_records, {}),
    "crops of random lengths": (texts, crops, masked, loss_of_records, {}),
    "masked tokens, record by record": (texts, masked_one_by_one, masked, loss_of_records, {}),
    "masked tokens, all at once": (texts, masked_all_at_once, masked, loss_of_records, {}),
    "a random number of swaps": (texts, swaps, masked, loss_of_records, {}),
    "frames left out": (sounds, frames, PooledFrames, loss_of_records, {}),
    "a sum over tokens": (texts, word_dropout, Tagger, of_tokens("sum"), {"loss_reduction": "sum"}),
    "physical batches of two": (texts, word_dropout, masked, loss_of_records, {"max_physical_batch_size": 2}),
}

# name: data, collation, model, loss, what an error says
WITH_A_COUPLING = {
    "cutmix": (texts, cut_and_mixed, masked, loss_of_records, "feeds into the model"),
    "mixup": (sounds, mixed_frames, PooledFrames, loss_of_records, "feeds into the model"),
    "mixup now and then": (sounds, mixed_now_and_then, PooledFrames, loss_of_records, "one by one"),
    "the mean of the batch": (sounds, centred_frames, PooledFrames, loss_of_records, "feeds into the model"),
    "a hundredth of it": (sounds, weakly_centred_frames, PooledFrames, loss_of_records, "feeds into the model"),
    "the deviation of the batch": (sounds, frames_over_deviation, PooledFrames, loss_of_records, "feeds into"),
    "rows sorted without their labels": (texts, rows_moved, masked, loss_of_records, "one by one"),
    "padding that takes part": (texts, word_dropout, lambda: Text(False), loss_of_records, r"out \(Linear\)"),
    "padding of frames that takes part": (sounds, frames, lambda: Frames(False), loss_of_records, r"out \(Linear\)"),
    "a mean over tokens": (texts, word_dropout, Tagger, of_tokens("mean"), "it is the loss"),
    "a sum where a mean was announced": (
        texts,
        word_dropout,
        masked,
        lambda m, x, y: F.cross_entropy(m(x), y, reduction="sum"),
        "loss is a sum",
    ),
}
