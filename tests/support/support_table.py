"""Writes ``docs/supported.md``: which layers and models can be trained privately, and how, as found by trying.

    python -m tests.support.support_table --out docs/supported.md     (or: make support-table)

Every model is run in float64, and the norms and sums of its per-sample gradients are compared with a loop over samples
with plain autograd. Nothing in the table is written by hand.
"""

import argparse
import copy
import gc
import re
import time
import warnings
from pathlib import Path
from typing import NamedTuple

import torch
from torch.utils._pytree import tree_map

from spectral_dp.gradients import ModelGradients
from spectral_dp.gradients.rules.fallback import FallbackRule
from tests.support.oracle import norm_of, relative_error
from tests.support.supported_layers import LAYERS, Entry

#: Gradients agree with the loop if they differ by no more than this: some models compute their norms in float32,
#: whatever they are given.
EXACT = 1e-6


class Finding(NamedTuple):
    """What was found of one model.

    Attributes:
        name: What the table calls it.
        how: ``"rule"``, ``"fallback"``, both, ``"refused"`` or ``"WRONG"``.
        detail: The modules that have no rule, or what the error says.
        error: Largest relative difference from the loop; None where it was refused.
        slowdown: Time of norms and clipped sums over that of a plain pass, or None.
    """

    name: str
    how: str
    detail: str
    error: float | None = None
    slowdown: float | None = None


def find(entry: Entry, *, timed: bool = False, samples: int = 4) -> Finding:
    """Tries one model."""
    torch.manual_seed(0)
    model = entry.make().double()
    plain, inputs = copy.deepcopy(model), tree_map(_double, entry.inputs(samples))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gradients = None
        try:
            gradients = ModelGradients(model)
            ours = _recorded(gradients, entry, inputs)
            fallbacks = [
                type(layer.rule.module).__name__
                for block, _ in gradients.trained_blocks
                for layer in block
                if isinstance(layer.rule, FallbackRule)
            ]
            layers = sum(len(block) for block, _ in gradients.trained_blocks)
        except (RuntimeError, ValueError, TypeError) as error:
            return Finding(entry.name, "refused", _words(error))
        finally:
            if gradients is not None:
                gradients.remove()
        error = _error(plain, entry, inputs, *ours)
        how = "rule" if not fallbacks else "fallback" if len(fallbacks) == layers else "rule, fallback"
        how = how if error < EXACT else "WRONG"
        slowdown = _slowdown(entry) if timed else None
    detail = ", ".join(f"`{name}`" for name in dict.fromkeys(fallbacks))
    return Finding(entry.name, how, detail, error, slowdown)


def _double(value):
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _call(model, entry, inputs):
    return entry.output(model(**inputs) if isinstance(inputs, dict) else model(inputs))


def _recorded(gradients, entry, inputs):
    """Output gradients, norms, weights, and weighted sums by parameter name."""
    out = _call(gradients.model, entry, inputs)
    dA = torch.randn_like(out)
    (out * dA).sum().backward()
    batch = gradients.take()
    c = torch.rand(batch.size, dtype=torch.float64)
    norms, sums = batch.squared_norms().sum(0), batch.clipped_sums(c)
    names = {p: name for name, p in gradients.model.named_parameters()}
    return dA, norms, c, {names[p]: gradients.gradient(p, value) for p, value in sums.items()}


def _error(plain, entry, inputs, dA, norms, c, sums):
    """Largest relative difference of norms and sums from those of the loop."""
    named = {name: p for name, p in plain.named_parameters() if p.requires_grad}
    rows = []
    for b in range(len(dA)):
        out = _call(plain, entry, tree_map(lambda value, b=b: value[b : b + 1], inputs))
        grads = torch.autograd.grad((out * dA[b : b + 1]).sum(), list(named.values()), allow_unused=True)
        rows.append([torch.zeros_like(p) if g is None else g for g, p in zip(grads, named.values(), strict=True)])
    expected = {name: torch.stack(column) for name, column in zip(named, zip(*rows, strict=True), strict=True)}
    if sums.keys() != expected.keys() or len(norms) != len(dA):
        return float("inf")
    largest = max(float(g.abs().max()) for g in expected.values())
    errors = [relative_error(norms, norm_of(expected))]
    for name, value in sums.items():
        difference = (value - torch.tensordot(c, expected[name], dims=1)).abs().max()
        errors.append(float(difference) / max(largest, 1e-30))  # a bias of keys has no gradient but rounding
    return max(errors)


def _slowdown(entry, samples: int = 32, runs: int = 5) -> float:
    """Seconds of a pass with norms and clipped sums over those of a plain one, the best of some each, in float32."""
    best = {}
    for private in (False, True) * 2:  # in turns: a busy machine hits both
        torch.manual_seed(0)
        model, inputs = entry.make(), entry.inputs(samples)
        gradients = ModelGradients(model) if private else None
        for _ in range(runs):
            start = time.perf_counter()
            _call(model, entry, inputs).square().sum().backward()
            if gradients is not None:
                batch = gradients.take()
                batch.clipped_sums(batch.squared_norms().sum(0).rsqrt().clamp(max=1))
            best[private] = min(time.perf_counter() - start, best.get(private, float("inf")))
            model.zero_grad()
        if gradients is not None:
            gradients.remove()
        del model, gradients
        gc.collect()
    return best[True] / best[False]


def _words(error: Exception) -> str:
    """What an error says, in one line that fits into a table."""
    text = re.sub(r"\s+", " ", str(error)).replace("|", "/")
    return text if len(text) <= 300 else f"{text[:300].rsplit(' ', 1)[0]} …"


def row(finding: Finding) -> str:
    """One line of the table."""
    error = "" if finding.error is None else f"{finding.error:.0e}" if finding.error else "0"
    slowdown = "" if finding.slowdown is None else f"{finding.slowdown:.1f}"
    return f"| {finding.name} | {finding.how} | {finding.detail} | {error} | {slowdown} |"


def rows_of(page: str) -> dict[str, list[str]]:
    """The cells of every line of the tables of a page, by the first."""
    lines = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| Model")]
    return {cells[0]: cells[1:] for cells in ([cell.strip() for cell in line[2:-1].split(" |")] for line in lines)}


_HEAD = "| Model | How | Modules without a rule, or what the error says | Difference | Time |"
_PAGE = """# What is supported, and how

This page is written by a script that tries every entry: `make support-table`. Do not edit it.

Each model is small and has random weights. The norms and the weighted sums of its per-sample gradients are compared, in
float64, with a loop over samples with plain autograd.

* **rule**: every trained parameter belongs to a layer with a rule of its own: exact and fast.
* **fallback**: the named modules have no rule. They are run again for each sample: exact and slower, and
  `batch x parameters` numbers are held for them.
* **refused**: the library raises the error that is quoted, before anything is released.
* **WRONG** would be a difference of more than {exact:.0e}. It must not appear.

*Difference* is the largest relative difference from the loop. *Time* is that of forward pass, backward pass, norms and
clipped sums over that of a plain forward and backward pass, in float32, for 32 samples, on the machine that wrote
this page. Layers and models are so small that the number of operations counts more than their size: see
[performance.md](performance.md) for large ones. Dropout is zero, because the loop would draw other masks.

## Layers of `torch.nn`

{layers}

## Models of Hugging Face and adapters

{models}
"""


def table(findings: list[Finding]) -> str:
    return "\n".join([_HEAD, "|---|---|---|---|---|", *map(row, findings)])


def page(layers: list[Finding], models: list[Finding]) -> str:
    """The whole page."""
    return _PAGE.format(exact=EXACT, layers=table(layers), models=table(models))


def main() -> None:
    parser = argparse.ArgumentParser(description="Try what is supported, and write the table.")
    parser.add_argument("--out", type=Path, default=Path("docs/supported.md"), help="File to write the page to.")
    parser.add_argument("--only", default="", help="Print the findings of entries whose name contains this.")
    options = parser.parse_args()
    from tests.support.supported_models import MODELS  # which need transformers

    findings = []
    for entries in (LAYERS, MODELS):
        findings.append([])
        for entry in entries:
            if options.only in entry.name:
                findings[-1].append(find(entry, timed=True))
                print(row(findings[-1][-1]), flush=True)
    if not options.only:
        options.out.write_text(page(*findings), encoding="utf-8")


if __name__ == "__main__":
    main()
