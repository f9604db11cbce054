"""What the table of supported models is made of, second part: small random models of Hugging Face, and adapters.

Needs ``transformers`` and ``peft``. Dropout is zero: the loop over samples, with which gradients are compared, would
draw other masks.
"""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

from spectral_dp import PrivacyEngine
from tests.support.supported_layers import Entry

hf, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")

WORDS, STEPS, WIDTH, LAYERS, HEADS, SIDE = 1000, 64, 128, 2, 4, 32

_SIZES = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 2 * WIDTH,
}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_LENGTH = {"max_position_embeddings": 2 * STEPS}


def _text(n):
    lengths = torch.randint(STEPS // 2, STEPS + 1, (n, 1))
    return {"input_ids": torch.randint(3, WORDS, (n, STEPS)), "attention_mask": (torch.arange(STEPS) < lengths).long()}


def _unpadded(n):
    return {"input_ids": torch.randint(3, WORDS, (n, STEPS))}


def _two_texts(n):
    return _text(n) | {"decoder_input_ids": torch.randint(3, WORDS, (n, STEPS // 2))}


def _pictures(n):
    return {"pixel_values": torch.randn(n, 3, SIDE, SIDE)}


def _logits(out):
    return out.logits


def _bert():
    return hf.BertForSequenceClassification(hf.BertConfig(**_SIZES, **_NO_DROPOUT, **_LENGTH))


def _roberta():
    return hf.RobertaForSequenceClassification(hf.RobertaConfig(**_SIZES, **_NO_DROPOUT, **_LENGTH))


def _albert():
    config = hf.AlbertConfig(**_SIZES, **_NO_DROPOUT, **_LENGTH, embedding_size=32, classifier_dropout_prob=0.0)
    return hf.AlbertForSequenceClassification(config)


def _distilbert():
    config = hf.DistilBertConfig(
        vocab_size=WORDS, dim=WIDTH, n_layers=LAYERS, n_heads=HEADS, hidden_dim=2 * WIDTH, dropout=0.0,
        attention_dropout=0.0, seq_classif_dropout=0.0, **_LENGTH,
    )  # fmt: skip
    return hf.DistilBertForSequenceClassification(config)


def _gpt2():
    config = hf.GPT2Config(
        vocab_size=WORDS, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_positions=2 * STEPS, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return hf.GPT2LMHeadModel(config)


def _llama():
    return hf.LlamaForCausalLM(hf.LlamaConfig(**_SIZES, num_key_value_heads=2, **_LENGTH))


def _qwen():
    return hf.Qwen2ForCausalLM(hf.Qwen2Config(**_SIZES, num_key_value_heads=2, **_LENGTH))


def _t5():
    config = hf.T5Config(
        vocab_size=WORDS, d_model=WIDTH, d_kv=32, d_ff=2 * WIDTH, num_layers=LAYERS, num_heads=HEADS, dropout_rate=0.0
    )
    return hf.T5ForConditionalGeneration(config)


def _vit():
    sizes = {name: size for name, size in _SIZES.items() if name != "vocab_size"}
    config = hf.ViTConfig(**sizes, **_NO_DROPOUT, image_size=SIDE, patch_size=8)
    return hf.ViTForImageClassification(config)


def _swin():
    config = hf.SwinConfig(
        image_size=SIDE, patch_size=4, embed_dim=32, depths=[2, 2], num_heads=[2, 2], window_size=4, drop_path_rate=0.0,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return hf.SwinForImageClassification(config)


def _convnext():
    config = hf.ConvNextConfig(hidden_sizes=[32, 64], depths=[1, 1], num_stages=2, image_size=SIDE, patch_size=4)
    return hf.ConvNextForImageClassification(config)


def _resnet():
    config = hf.ResNetConfig(embedding_size=32, hidden_sizes=[32, 64], depths=[1, 1], layer_type="basic")
    return hf.ResNetForImageClassification(config)


def _compatible(make):
    return lambda: PrivacyEngine.get_compatible_module(make())


def _lora(make, targets, **options):
    return lambda: peft.get_peft_model(
        make(), peft.LoraConfig(target_modules=targets, r=4, lora_dropout=0.0, **options)
    )


def _biases_only(make):
    def made():
        model = make()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.endswith("bias"))
        return model

    return made


MODELS = [
    Entry("BERT", _bert, _text, _logits),
    Entry("BERT, LoRA", _lora(_bert, ["query", "value"], modules_to_save=["classifier"]), _text, _logits),
    Entry("BERT, biases only (BitFit)", _biases_only(_bert), _text, _logits),
    Entry("RoBERTa", _roberta, _text, _logits),
    Entry("DistilBERT", _distilbert, _text, _logits),
    Entry("ALBERT (shared layers)", _albert, _text, _logits),
    Entry("GPT-2", _gpt2, _unpadded, _logits),
    Entry("GPT-2, LoRA", _lora(_gpt2, ["c_attn"], fan_in_fan_out=True), _unpadded, _logits),
    Entry("Llama", _llama, _unpadded, _logits),
    Entry("Llama, LoRA", _lora(_llama, ["q_proj", "v_proj"]), _unpadded, _logits),
    Entry("Qwen2", _qwen, _unpadded, _logits),
    Entry("T5", _t5, _two_texts, _logits),
    Entry("ViT", _vit, _pictures, _logits),
    Entry("Swin", _swin, _pictures, _logits),
    Entry("ConvNeXt", _convnext, _pictures, _logits),
    Entry("ResNet", _resnet, _pictures, _logits),
    Entry("ResNet, `get_compatible_module`", _compatible(_resnet), _pictures, _logits),
]
