"""Fine-tune a language model with the Trainer of transformers, privately."""

# %% [markdown]
# # Fine-tune a language model
#
# `PrivateTrainer` takes the place of `Trainer` in a script for Hugging Face transformers. You need `pip install
# 'spectral-dp[transformers]'`. So that this page needs no download, the model is a tiny BERT with random weights, and
# the texts are made up: is a sentence about a film kind or not? With a real checkpoint only the line that makes the
# model changes.

# %%
import random
import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments, logging

logging.set_verbosity_error()
torch.manual_seed(0)
torch.set_num_threads(1)
rng = random.Random(0)
WORDS = ["[PAD]", "fine", "warm", "funny", "bright", "dull", "cold", "flat", "tired", *(f"word{i}" for i in range(40))]


def sentence():
    label = rng.randrange(2)
    telling = rng.choices(range(1, 5) if label else range(5, 9), k=3)
    said = telling + rng.choices(range(9, len(WORDS)), k=5)
    rng.shuffle(said)
    return {"input_ids": said, "labels": label}


train, test = [sentence() for _ in range(4000)], [sentence() for _ in range(500)]
print(" ".join(WORDS[i] for i in train[0]["input_ids"]), "->", ["unkind", "kind"][train[0]["labels"]])

# %% [markdown]
# The vocabulary is fixed in advance. One that is learnt from private texts tells which words were written.
#
# ## The model and the trainer
#
# `expected_batch_size` is how many texts a step draws on average, and decides the privacy.
# `per_device_train_batch_size` is how many of them are in memory at once, and decides nothing else.

# %%
from spectral_dp.integrations.transformers import PrivacyArguments, PrivateTrainer

config = BertConfig(
    vocab_size=len(WORDS), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
    max_position_embeddings=16, num_labels=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip
model = BertForSequenceClassification(config)


def accuracy(prediction):
    return {"accuracy": float((prediction.predictions.argmax(1) == prediction.label_ids).mean())}


folder = tempfile.TemporaryDirectory()
trainer = PrivateTrainer(
    model,
    TrainingArguments(
        output_dir=folder.name, per_device_train_batch_size=256, num_train_epochs=10, learning_rate=5e-3,
        report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True,
    ),
    privacy=PrivacyArguments(
        target_epsilon=3.0, target_delta=1e-5, per_sample_max_grad_norm=0.5, expected_batch_size=400
    ),
    train_dataset=train, eval_dataset=test, compute_metrics=accuracy,
)  # fmt: skip
before = trainer.evaluate()["eval_accuracy"]
trainer.train()
after = trainer.evaluate()["eval_accuracy"]
print(f"held-out accuracy: {before:.1%} before, {after:.1%} after")
print(f"epsilon {trainer.epsilon:.2f} at delta 1e-5, after {trainer.state.global_step} steps")

# %% [markdown]
# ## What was different from an ordinary Trainer?
#
# - Batches were drawn by coins, one for each text, so their sizes differ; the number of steps does not.
# - Each text's gradient was clipped over *all* layers of BERT together. No gradient of a single text was stored, not
#   even that of the embedding table: rules for embeddings, attention, LayerNorm and dense layers compute norms and
#   sums.
# - The training loss is not logged. It is computed from raw texts without noise, and nobody would account for it.
#
# Whether a model can be trained privately can be asked before training:

# %%
from spectral_dp.gradients import find_problems

print("problems:", find_problems(model) or "none")
print(sum(p.numel() for p in model.parameters()), "parameters, all of them trained")

# %% [markdown]
# With adapters (`peft`), large models train a few hundred thousand numbers instead of all;
# `examples/transformers_text.py` does this, and [the how-to](../integrations.md) lists what is supported and what is
# refused, with the reason.

# %%
folder.cleanup()
