"""The linear-map and neighbour audits through a transformer and an LSTM, and the mistakes that they catch there.

Everything goes through the step of the engine. The models are in ``tests/support/sequence_targets.py``.
"""

import pytest
import torch
from tests.support import broken_steps as broken
from tests.support import sequence_targets as sequences

from spectral_dp import audit
from spectral_dp.audit.targets.noise_control import Script
from spectral_dp.gradients.rules import registry

MAKERS = {"transformer": sequences.transformer, "LSTM": sequences.recurrent}
SIGMA = sequences.CLAIM.noise_multiplier
LAYERS = {
    "transformer": {"words", "positions", "head"}
    | {f"encoder.layers.0.{part}" for part in ("self_attn", "linear1", "linear2", "norm1", "norm2")},
    "LSTM": {"words", "lstm", "head"},
}


def linear_map(target, layer=None):
    """The verdict on all layers, or on one."""
    generator = torch.Generator().manual_seed(0)
    blocks = [block for block in target.blocks(1, generator) if layer in (None, block.layer)]
    return audit.check_linear_map(target, audit.find_noise_map(target), blocks, generator)


def neighbour_lines(target, **options):
    """The verdicts of the neighbour audit by name."""
    return {v.audit: v for v in audit.check_neighbours(target, torch.Generator().manual_seed(0), **options)}


def movement(target):
    """The first line of the neighbour audit, without the others."""
    return next(audit.check_neighbours(target, torch.Generator().manual_seed(0)))


BOTH = pytest.mark.parametrize(
    ("model", "clipping"),
    [
        ("transformer", "per_layer"),
        ("LSTM", "flat"),
        pytest.param("transformer", "flat", marks=pytest.mark.slow),
        pytest.param("LSTM", "per_layer", marks=pytest.mark.slow),
    ],
)


@BOTH
def test_every_direction_carries_the_claimed_noise(model, clipping):
    found = linear_map(MAKERS[model](clipping=clipping))
    assert found.ok, found
    assert found.measured == pytest.approx(SIGMA, rel=1e-3), "attained: the claim is tight"
    assert set(found.details["per_layer"]) == LAYERS[model], "no layer is left out"
    assert not found.details["left_out"]
    if clipping == "per_layer":
        assert min(found.details["per_layer"].values()) > 1.5 * SIGMA
        assert found.details["jointly"] == pytest.approx(SIGMA, rel=1e-3), "long in all layers at once"


@BOTH
def test_every_record_is_bounded(model, clipping, few_batches):
    found = neighbour_lines(MAKERS[model](clipping=clipping))
    assert all(v.ok for v in found.values()), found
    assert found["neighbours"].measured == pytest.approx(1, rel=1e-2), "attained"
    tried = [*found["neighbours"].details["records"], *found["neighbours, not finite"].details["records"]]
    assert {"long", "one word, long", "first word", "last word", "empty"} <= set(tried)
    assert {"activations x 1e+06", "activations NaN", "loss NaN"} <= set(tried)


def test_the_embeddings_are_looked_at_at_both_ends_of_the_vocabulary():
    blocks = sequences.transformer().blocks(2, torch.Generator().manual_seed(0))
    assert {b.name for b in blocks if b.layer == "words"} == {"row 0", f"row {sequences.WORDS - 1}"}
    blocks = sequences.recurrent().blocks(2, torch.Generator().manual_seed(0))
    assert {b.name for b in blocks if b.layer == "words"} == {"row 1", f"row {sequences.WORDS - 1}"}, "0 is padding"


@pytest.mark.parametrize("part", sequences.BROKEN_RULES)
def test_control_a_part_that_is_forgotten_in_the_norm_is_caught(part, monkeypatch, few_batches):
    """One gate, or one projection: the norm is too small, so more than the bound goes out."""
    make, kind, layer, rule = sequences.BROKEN_RULES[part]
    monkeypatch.setitem(registry._RULES, kind, rule)
    target = make()
    found = linear_map(target, layer)
    assert found.ok is False
    assert found.measured < 0.99 * SIGMA
    assert movement(target).ok is False


@pytest.mark.slow
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("part", sequences.BROKEN_RULES)
def test_control_such_a_part_is_caught_by_both_whole_audits(part, clipping, monkeypatch):
    make, kind, _, rule = sequences.BROKEN_RULES[part]
    monkeypatch.setitem(registry._RULES, kind, rule)
    target = make(clipping=clipping)
    assert linear_map(target).ok is False
    assert neighbour_lines(target, thorough=True)["neighbours"].ok is False


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (sequences.recurrent, "lstm.weight_hh_l0"),  # and that of the input, which has the same shape
        (sequences.transformer, "encoder.layers.0.self_attn.in_proj_weight"),
        (sequences.transformer, "positions.weight"),
    ],
)
def test_control_a_block_without_noise_is_caught(make, name):
    layer = name.rpartition(".")[0]
    shapes = {output.name: output.shape for output in make().outputs}
    found = linear_map(make(kind=broken.BrokenTarget, mistake=broken.bare_where(shapes[name])), layer)
    assert found.ok is False
    assert found.measured == 0
    assert layer in found.details["directions_without_noise"]


def test_control_records_that_look_at_each_other_are_caught(few_batches):
    """Each record is clipped to the bound, but what it contributes hangs on the others."""
    found = neighbour_lines(sequences.transformer(model=sequences.Crowd))
    assert found["neighbours"].ok is False
    assert found["neighbours"].measured > 1.1
    assert found["batch size"].ok is False
    assert found["batch size"].details["changes"]["a record that contributes nothing"] > 0.1


def test_control_a_state_that_is_carried_to_the_next_batch_is_caught(few_batches):
    """Kept outside of the model, where the engine does not look."""
    found = neighbour_lines(sequences.recurrent(model=sequences.Carrying))
    assert found["neighbours"].ok is False
    assert found["batch size"].ok is False
    assert found["batch size"].details["changes"]["the batches before"] > 0.01


def test_a_state_that_is_carried_in_the_model_is_refused_by_the_engine():
    target = sequences.recurrent(model=sequences.CarryingInside)
    with pytest.raises(RuntimeError, match="left something behind in the model"):
        target.release(target.ordinary(3, torch.Generator()), Script())


@pytest.mark.slow
@pytest.mark.parametrize("clipping", ["flat", "per_layer", "automatic"])
@pytest.mark.parametrize(
    ("make", "sizes"),
    [
        (sequences.transformer, {"layers": 2}),
        (sequences.recurrent, {"layers": 2, "bidirectional": True}),
        (sequences.circulant_attention, {}),
    ],
    ids=["transformer", "LSTM", "circulant attention"],
)
def test_deeper_models_pass_thorough_audits(make, sizes, clipping):
    target = make(clipping=clipping, **sizes)
    found = linear_map(target)
    assert found.ok, found
    assert found.measured == pytest.approx(SIGMA, rel=1e-3)
    lines = neighbour_lines(target, thorough=True)
    assert all(v.ok for v in lines.values()), lines


@pytest.mark.slow
@pytest.mark.parametrize("model", MAKERS)
def test_the_whole_suite_passes_with_the_noise_of_a_private_run(model):
    effort = audit.Effort(1, canary_blocks=8, per_block=4, scores=600, run_scores=20, steps=20, noise_steps=8, calls=40)
    report = audit.run_audit(MAKERS[model](seed=None), effort=effort, confidence=1 - 1e-4)
    assert all(v.ok for v in report.verdicts), report.violations
