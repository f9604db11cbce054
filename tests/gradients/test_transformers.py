"""The models that people train, from the published package, with small random configurations: exact in every parameter.

Skipped where ``transformers`` is not installed.
"""

import math
import os

import pytest
import torch
from tests.support.oracle import relative_error

from spectral_dp.gradients import ModelGradients
from spectral_dp.gradients.rules.fallback import FallbackRule
from spectral_dp.mechanism.clipping import clip_factors

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers", reason="the published models, from the package transformers")

pytestmark = [
    pytest.mark.filterwarnings("ignore:no rule for"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

TOLERANCE = 1e-8
TEXT = {"vocab_size": 30, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 20, "hidden_size": 16}
IMAGE = {k: v for k, v in TEXT.items() if k != "vocab_size"} | {"num_channels": 2, "num_labels": 3}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2}


def bert():
    config = transformers.BertConfig(**TEXT, **NO_DROPOUT, max_position_embeddings=12, num_labels=3)
    return transformers.BertForSequenceClassification(config)


def distilbert():
    config = transformers.DistilBertConfig(
        vocab_size=30, dim=16, n_layers=2, n_heads=2, hidden_dim=20, max_position_embeddings=12, num_labels=3,
        dropout=0.0, attention_dropout=0.0, seq_classif_dropout=0.0,
    )  # fmt: skip
    return transformers.DistilBertForSequenceClassification(config)


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=30, n_embd=16, n_layer=2, n_head=2, n_positions=12, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        use_cache=False, **TOKENS,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def t5():
    config = transformers.T5Config(
        vocab_size=30, d_model=16, d_kv=8, d_ff=20, num_layers=2, num_heads=2, dropout_rate=0.0, use_cache=False,
        decoder_start_token_id=0, relative_attention_num_buckets=6, relative_attention_max_distance=8,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def llama():
    config = transformers.LlamaConfig(**TEXT, num_key_value_heads=2, max_position_embeddings=12, use_cache=False)
    return transformers.LlamaForCausalLM(config)


def vit():
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(**IMAGE, **NO_DROPOUT, image_size=8, patch_size=4)
    )


def dinov2():
    config = {k: v for k, v in IMAGE.items() if k != "intermediate_size"}
    return transformers.Dinov2ForImageClassification(transformers.Dinov2Config(**config, image_size=8, patch_size=4))


def swin():
    config = transformers.SwinConfig(
        image_size=16, patch_size=2, num_channels=2, embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=4,
        num_labels=3, drop_path_rate=0.0,
    )  # fmt: skip
    return transformers.SwinForImageClassification(config)


def convnext():
    config = transformers.ConvNextConfig(
        num_channels=2, patch_size=2, hidden_sizes=[8, 8], depths=[1, 1], num_stages=2, image_size=16, num_labels=3
    )
    return transformers.ConvNextForImageClassification(config)


MODELS = [bert, distilbert, gpt2, t5, llama, vit, dinov2, swin, convnext]


def batch_for(make, samples, tokens=7):
    if make in (vit, dinov2, swin, convnext):
        size = 8 if make in (vit, dinov2) else 16
        return {"pixel_values": torch.randn(samples, 2, size, size).double()}
    batch = {"input_ids": torch.randint(1, 30, (samples, tokens))}
    if make in (bert, distilbert):
        batch["attention_mask"] = (torch.arange(tokens) < torch.randint(3, tokens + 1, (samples, 1))).long()
    if make is t5:
        batch["decoder_input_ids"] = torch.randint(1, 30, (samples, 5))
    return batch


def recorded(model, batch):
    gradients = ModelGradients(model)
    logits = model(**batch).logits
    dA = torch.randn_like(logits)
    (logits * dA).sum().backward()
    taken = gradients.take()
    gradients.remove()
    return gradients, taken, dA


def loop_over_samples(model, batch, dA):
    rows = []
    for b in range(len(dA)):
        logits = model(**{name: value[b : b + 1] for name, value in batch.items()}).logits
        value = (logits * dA[b : b + 1]).sum()
        rows.append(torch.autograd.grad(value, list(model.parameters()), materialize_grads=True, allow_unused=True))
    return [torch.stack(column) for column in zip(*rows, strict=True)]


def check(model, batch, tolerance=None):
    if tolerance is None:
        tolerance = 1e-6 if type(model).__name__.startswith("T5") else TOLERANCE  # its layer norms, in float32
    gradients, taken, dA = recorded(model, batch)
    expected = loop_over_samples(model, batch, dA)
    norms = sum(g.flatten(1).square().sum(1) for g in expected)
    assert relative_error(taken.squared_norms().sum(0), norms) < tolerance
    c = torch.rand(len(dA)).double()
    sums = taken.clipped_sums(c)
    largest = max(float(g.abs().max()) for g in expected)
    for parameter, g in zip(model.parameters(), expected, strict=True):
        error = gradients.gradient(parameter, sums[parameter]) - torch.tensordot(c, g, dims=1)
        assert float(error.abs().max()) < tolerance * largest


@pytest.mark.parametrize("samples", [1, 2, 5, 7])
@pytest.mark.parametrize("make", MODELS, ids=lambda f: f.__name__)
def test_full_fine_tuning_is_exact(make, samples):
    """With 5 and 7 samples there are as many as positions in some of the models."""
    torch.manual_seed(samples)
    check(make().double().train(), batch_for(make, samples))


def test_t5_is_as_exact_as_others_but_for_its_own_rounding(monkeypatch):
    """Its layer norms compute in float32 whatever they are given; in float64 no allowance is needed."""

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)

    monkeypatch.setattr(transformers.models.t5.modeling_t5.T5LayerNorm, "forward", forward)
    torch.manual_seed(0)
    check(t5().double().train(), batch_for(t5, 5), TOLERANCE)


@pytest.mark.parametrize("make", [bert, vit, swin], ids=lambda f: f.__name__)
def test_with_activation_checkpointing(make):
    torch.manual_seed(0)
    model = make().double().train()
    model.gradient_checkpointing_enable()
    check(model, batch_for(make, 4))


def test_eager_attention():
    torch.manual_seed(0)
    for make in (t5, swin):
        model = make().double()
        model.set_attn_implementation("eager")
        check(model, batch_for(make, 4))


@pytest.mark.parametrize("make", [bert, distilbert, gpt2, t5, vit], ids=lambda f: f.__name__)
def test_nothing_goes_to_the_slow_fallback_but_what_has_no_layers(make):
    gradients = ModelGradients(make())
    gradients.remove()
    slow = {type(r.module) for block in gradients.blocks for _, r in block if isinstance(r, FallbackRule)}
    assert {kind.__name__ for kind in slow} <= {"Conv1D", "T5LayerNorm"}, "which have no parts"


@pytest.mark.parametrize("make", [bert, gpt2, t5, vit, swin], ids=lambda f: f.__name__)
def test_no_sample_moves_the_sums_further_than_the_bound(make):
    """Check B: hostile samples beside ordinary ones, in float32."""
    torch.manual_seed(0)
    model, bound = make().float(), 0.7
    base = {n: v.float() if v.is_floating_point() else v for n, v in batch_for(make, 3).items()}
    gradients = ModelGradients(model)

    def release(batch, scale=1.0):
        (scale * model(**batch).logits.square()).sum().backward()
        taken = gradients.take()
        c = clip_factors(taken.squared_norms().sum(0).sqrt(), bound)
        return torch.cat([v.double().flatten() for v in taken.clipped_sums(c).values()])

    for scale in (1.0, 1e6, 1e-6):
        before = release(base, scale)
        for change in (1.0, 1e6, 1e20, 0.0, math.nan, math.inf):
            added = {n: v[:1] * change if v.is_floating_point() else torch.full_like(v[:1], 1) for n, v in base.items()}
            after = release({n: torch.cat([base[n], added[n]]) for n in base}, scale)
            assert bool(after.isfinite().all())
            assert float((after - before).norm()) <= bound * (1 + 1e-5)
    gradients.remove()
