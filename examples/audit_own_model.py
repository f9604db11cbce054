"""Audit a model of your own before it is trained: here, a classifier of sequences of tokens.

    python examples/audit_own_model.py [--mixes-records] [--all]

The audit needs the model, a few samples in the form in which the model takes them, and what you claim of the training.
It reads no other data and trains nothing. Records that you fear most can be given by name. By default the two exact
audits are made, in seconds: the noise of every layer, and how far one record can move a step. With ``--all`` all audits
are made, in a few minutes. With ``--mixes-records`` the model centres its scores over the batch, and the audit says so.
"""

import argparse
import sys

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from spectral_dp import audit

WORDS, STEPS, WIDTH, CLASSES = 50, 12, 16, 4


class Classifier(nn.Module):
    """Reads tokens ``(B, T)`` of the given lengths ``(B,)``, in both directions."""

    def __init__(self, mixes_records: bool = False):
        super().__init__()
        self.mixes_records = mixes_records
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        x = pack_padded_sequence(self.words(tokens), lengths.clamp(min=1), batch_first=True, enforce_sorted=False)
        _, (state, _) = self.lstm(x)
        scores = self.head(torch.cat([state[-2], state[-1]], dim=1))
        return scores - scores.mean(0) if self.mixes_records else scores


def samples(count: int) -> dict[str, Tensor]:
    """Sequences of all lengths, as a data loader would collate them."""
    lengths = torch.randint(1, STEPS + 1, (count,))
    tokens = torch.randint(1, WORDS, (count, STEPS)) * (torch.arange(STEPS) < lengths[:, None])
    return {"tokens": tokens, "lengths": lengths}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mixes-records", action="store_true")
    parser.add_argument("--all", action="store_true")
    options = parser.parse_args()
    target = audit.SpectralTarget(
        Classifier(options.mixes_records),
        audit.Claim(noise_multiplier=1.1, max_grad_norm=1.0, expected_batch_size=32, sample_rate=0.01, steps=300),
        batch=samples(8),
        hostile={
            "longest": {"tokens": torch.full((1, STEPS), WORDS - 1), "lengths": torch.tensor([STEPS])},
            "empty": {"tokens": torch.zeros(1, STEPS, dtype=torch.long), "lengths": torch.tensor([0])},
        },
        clipping="per_layer",
        name="my classifier",
    )
    if options.all:
        report = audit.run_audit(target)
        print(report)
        sys.exit(0 if report.ok else 1)
    generator = torch.Generator().manual_seed(0)
    noise, blocks = audit.find_noise_map(target), target.blocks(2, generator)
    verdicts = [audit.check_linear_map(target, noise, blocks, generator), *audit.check_neighbours(target, generator)]
    for v in verdicts:
        print(
            f"{v.audit}: {v.outcome}. {v.quantity} {v.measured:.4g}, {v.wanted} {v.claimed:.4g} ({v.note or 'exact'})"
        )
    sys.exit(0 if all(v.ok for v in verdicts) else 1)


if __name__ == "__main__":
    main()
