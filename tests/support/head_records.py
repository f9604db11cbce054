"""Features of a few classes that a linear head can tell apart, and records that mean no good."""

import torch

CLASSES = 4


def clusters(n, features=12, seed=0, spread=0.5):
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(CLASSES, features, generator=torch.Generator().manual_seed(99))
    labels = torch.randint(0, CLASSES, (n,), generator=generator)
    return (centres[labels] + spread * torch.randn(n, features, generator=generator)).half(), labels


#: A record of ``features`` numbers by what is wrong with it.
HOSTILE = {
    "ordinary": lambda x: x,
    "a million times as long": lambda x: 1e6 * x,
    "too long to be squared": lambda x: 1e200 * x,
    "too short to be squared": lambda x: 1e-200 * x,
    "zeros": torch.zeros_like,
    "not a number": lambda x: x * torch.nan,
    "infinite": lambda x: x * torch.inf,
    "one number": lambda x: 1e9 * torch.eye(len(x)).double()[2],
    "all equal": torch.ones_like,
}
