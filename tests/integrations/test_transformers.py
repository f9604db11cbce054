"""The Trainer of transformers trains privately: its steps are the ledger's, and nothing of the raw data leaves."""

import json
import math
import shutil

import pytest
import torch
from tests.support import trainer_programs
from torch import nn

from spectral_dp import CheckpointError, PoissonLoader, PrivacyEngine, RehearsalError, accounting
from spectral_dp.accounting import Ledger
from spectral_dp.training.coins import SeededCoins

transformers = pytest.importorskip("transformers", reason="needs the extra spectral-dp[transformers]")

from spectral_dp.integrations.transformers import PrivacyArguments, PrivateTrainer  # noqa: E402

# The packages of others warn of each other's old ways.
pytestmark = [
    pytest.mark.filterwarnings("default::DeprecationWarning"),
    pytest.mark.filterwarnings("default::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*"),
]

RECORDS, BATCH, DELTA, SEED = 60, 12, 1e-3, 5
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


class Classifier(nn.Module):
    """A model of one's own, trained in full; its loss is the mean over the batch."""

    def __init__(self):
        super().__init__()
        self.hidden, self.out = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x, labels=None):
        logits = self.out(torch.tanh(self.hidden(x)))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


def records(count=RECORDS):
    generator = torch.Generator().manual_seed(1)
    x, labels = torch.randn(count, 6, generator=generator), torch.randint(3, (count,), generator=generator)
    return [{"x": a, "labels": b} for a, b in zip(x, labels, strict=True)]


def texts(count=RECORDS, vocabulary=30):
    """Of different lengths."""
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(3, 9, (count,), generator=generator).tolist()
    return [torch.randint(1, vocabulary, (n,), generator=generator) for n in lengths]


def padded(batch):
    ids = nn.utils.rnn.pad_sequence([record["input_ids"] for record in batch], batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(r["input_ids"]) for r in batch], batch_first=True)
    labels = (
        nn.utils.rnn.pad_sequence([r["labels"] for r in batch], batch_first=True, padding_value=-100)
        if batch[0]["labels"].ndim
        else torch.stack([r["labels"] for r in batch])
    )
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def bert(**options):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(vocab_size=30, max_position_embeddings=16, num_labels=2, **sizes | options)
    return lora(transformers.BertForSequenceClassification(config), "SEQ_CLS", ["query", "value"])


def gpt2():
    config = transformers.GPT2Config(vocab_size=30, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    return lora(transformers.GPT2LMHeadModel(config), "CAUSAL_LM", ["c_attn"], fan_in_fan_out=True)


def lora(model, task, modules, **options):
    peft = pytest.importorskip("peft", reason="needs the extra spectral-dp[peft]")
    return peft.get_peft_model(model, peft.LoraConfig(task_type=task, r=2, target_modules=modules, **options))


def arguments(path, **options):
    defaults = {"num_train_epochs": 2, "per_device_train_batch_size": 5, "logging_steps": 2, "save_strategy": "no"}
    fixed = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "learning_rate": 0.1, "optim": "sgd"}
    return transformers.TrainingArguments(output_dir=str(path), **fixed | defaults | options)


def trainer(path, *, model=None, data=None, engine=None, privacy=None, cls=PrivateTrainer, others=None, **options):
    torch.manual_seed(0)
    settings = {
        "target_delta": DELTA,
        "per_sample_max_grad_norm": 1.0,
        "expected_batch_size": BATCH,
        "noise_multiplier": 1.5,
    }
    return cls(
        model if model is not None else Classifier(),
        arguments(path, **options),
        privacy=PrivacyArguments(**settings | (privacy or {})),
        engine=engine,
        train_dataset=data if data is not None else records(),
        **others or {},
    )


def seeded():
    return PrivacyEngine(seed=SEED, reproducibility_over_privacy=True)


def coins():
    return SeededCoins(SEED, reproducibility_over_privacy=True)


def weights(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def first_batch(data, batch_size=BATCH):
    loader = PoissonLoader(data, batch_size=batch_size, coins=coins())
    return next(iter(loader))


def clipped_sum(model, loss_of, count, bound):
    """By a loop over samples."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    total = {name: torch.zeros_like(p) for name, p in trained.items()}
    for i in range(count):
        gradients = torch.autograd.grad(loss_of(i), list(trained.values()), allow_unused=True)
        gradients = [torch.zeros_like(p) if g is None else g for g, p in zip(gradients, trained.values(), strict=True)]
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients))
        for name, gradient in zip(trained, gradients, strict=True):
            total[name] += min(1.0, bound / norm) * gradient
    return total


def test_epsilon_is_that_of_the_steps_that_were_run(tmp_path):
    run = trainer(tmp_path)
    result = run.train()
    steps = 2 * math.ceil(RECORDS / BATCH)
    assert result.global_step == run.engine.accountant.ledger.steps == steps
    assert run.epsilon == accounting.epsilon(1.5, BATCH / RECORDS, steps, DELTA)
    assert run.state.log_history[-1]["epsilon"] == run.epsilon
    epsilons = [entry["epsilon"] for entry in run.state.log_history]
    assert epsilons == sorted(epsilons)
    assert run.state.epoch == 2


@pytest.mark.parametrize("options", [{"num_train_epochs": 1.5}, {"max_steps": 7}])
def test_a_target_is_spent_by_the_planned_steps_and_not_exceeded(tmp_path, options):
    run = trainer(tmp_path, privacy={"target_epsilon": 3.0, "noise_multiplier": None}, **options)
    steps = run.train().global_step
    assert steps == options.get("max_steps", 8)
    assert 2.9 < run.epsilon <= 3.0


@pytest.mark.filterwarnings("ignore:noise_multiplier is 0")
def test_the_release_is_the_clipped_sum_over_a_public_constant(tmp_path):
    """Without noise, in three physical batches or more: what reaches the weights is what a loop over samples gives."""
    bound = 0.5
    for size in (4, 100):
        run = trainer(
            tmp_path,
            engine=seeded(),
            privacy={"noise_multiplier": 0.0, "per_sample_max_grad_norm": bound},
            per_device_train_batch_size=size,
            learning_rate=1.0,
            lr_scheduler_type="constant",
            max_steps=1,
        )
        before, batch = weights(run.model), first_batch(records())
        expected = clipped_sum(
            run.model, lambda i: run.model(batch["x"][i : i + 1], batch["labels"][i : i + 1])["loss"],  # noqa: B023
            len(batch["x"]), bound,
        )  # fmt: skip
        run.train()
        for name, value in weights(run.model).items():
            torch.testing.assert_close(before[name] - value, expected[name] / BATCH, rtol=1e-4, atol=1e-6)


def test_negative_control_the_plain_trainer_does_something_else(tmp_path):
    torch.manual_seed(0)
    batch = first_batch(records())
    data = [{"x": x, "labels": y} for x, y in zip(batch["x"], batch["labels"], strict=True)]
    args = arguments(tmp_path, learning_rate=1.0, lr_scheduler_type="constant", max_steps=1, max_grad_norm=0.5)
    args.per_device_train_batch_size = len(data)
    run = transformers.Trainer(Classifier(), args, train_dataset=data)
    before = weights(run.model)
    expected = clipped_sum(
        run.model, lambda i: run.model(batch["x"][i : i + 1], batch["labels"][i : i + 1])["loss"], len(data), 0.5
    )
    run.train()
    moved = {name: before[name] - value for name, value in weights(run.model).items()}
    assert any((moved[name] - expected[name] / BATCH).norm() > 0.05 * moved[name].norm() for name in moved)


@pytest.mark.parametrize("is_lora", [False, True])
def test_a_run_that_was_killed_goes_on_with_its_ledger(tmp_path, is_lora):
    """In the middle of an epoch; with everything seeded, the weights are those of a run that nobody disturbed."""

    class Kill(transformers.TrainerCallback):
        def on_save(self, args, state, control, **_):
            if state.global_step == 3:
                raise KeyboardInterrupt

    data = [{"input_ids": t, "labels": t[0] % 2} for t in texts()] if is_lora else records()

    def make(path, callbacks=()):
        torch.manual_seed(0)
        model = bert(**NO_DROPOUT) if is_lora else Classifier()
        others = {"callbacks": list(callbacks)} | ({"data_collator": padded} if is_lora else {})
        steps = {"save_strategy": "steps", "save_steps": 3, "optim": "adamw_torch"}
        return trainer(path, model=model, data=data, engine=seeded(), others=others, **steps)

    whole = make(tmp_path / "whole")
    whole.train()
    killed = make(tmp_path / "killed", [Kill()])
    with pytest.raises(KeyboardInterrupt):
        killed.train()
    assert killed.engine.accountant.ledger.steps == 3
    resumed = make(tmp_path / "killed")
    result = resumed.train(resume_from_checkpoint=True)
    assert result.global_step == resumed.engine.accountant.ledger.steps == 10
    assert resumed.epsilon == whole.epsilon
    assert resumed.engine.accountant.ledger.continues(killed.engine.accountant.ledger)
    assert resumed.state.epoch == 2
    for name, value in weights(whole.model).items():
        torch.testing.assert_close(weights(resumed.model)[name], value, rtol=0, atol=0)
    statement = json.loads((tmp_path / "killed/checkpoint-9/privacy.json").read_text())
    assert statement["steps"][0]["steps"] == 9
    assert not statement["noise_and_batches_are_secret"]


def test_a_checkpoint_of_adapters_holds_adapters_only(tmp_path):
    data = [{"input_ids": t, "labels": t[0] % 2} for t in texts()]
    others, more = {"data_collator": padded}, {"max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    run = trainer(tmp_path, model=bert(), data=data, others=others, **more)
    run.train()
    saved = torch.load(tmp_path / "checkpoint-1/privacy.pt", weights_only=True)["module"]
    assert set(saved) == {name for name, p in run.model.named_parameters() if p.requires_grad}


def test_a_run_that_was_killed_while_it_saved_goes_on_from_the_checkpoint_before(tmp_path, caplog):
    """As torchrun --max-restarts does. A checkpoint that was saved to its end, but without its ledger, is refused."""
    settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 5}
    trainer(tmp_path, engine=seeded(), **settings).train()
    (tmp_path / "checkpoint-4/privacy.pt").unlink()
    (tmp_path / "checkpoint-5").rename(tmp_path / "checkpoint-of-mine")
    with pytest.raises(CheckpointError, match=r"checkpoint-4 has no privacy\.pt"):
        trainer(tmp_path, engine=seeded(), **settings).train(resume_from_checkpoint=True)
    (tmp_path / "checkpoint-4/trainer_state.json").unlink()
    resumed = trainer(tmp_path, engine=seeded(), **settings)
    with pytest.warns(UserWarning, match="another engine is at step 5"):  # which nobody has killed here
        resumed.train(resume_from_checkpoint=True)
    assert "killed while it saved checkpoint-4" in caplog.text
    assert resumed.state.global_step == resumed.engine.accountant.ledger.steps == 5
    saved = torch.load(tmp_path / "checkpoint-4/privacy.pt", weights_only=True)
    assert Ledger.from_state_dict(saved["ledger"]).steps == 4, "written anew"


def test_a_checkpoint_without_its_ledger_is_refused(tmp_path):
    run = trainer(tmp_path, save_strategy="steps", save_steps=2, max_steps=4)
    run.train()
    shutil.copy(tmp_path / "checkpoint-2/privacy.pt", tmp_path / "checkpoint-4/privacy.pt")  # saves two steps
    with pytest.raises(CheckpointError, match="forget"):
        run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    with pytest.warns(UserWarning, match="another engine"), pytest.raises(CheckpointError, match="saved together"):
        trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    (tmp_path / "checkpoint-4/privacy.pt").unlink()
    with pytest.raises(CheckpointError, match=r"no privacy\.pt"):
        trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))


def test_training_again_goes_on_within_the_budget(tmp_path, caplog):
    run = trainer(tmp_path, privacy={"target_epsilon": 3.0, "noise_multiplier": None}, max_steps=4)
    assert run.train().global_step == 4
    with caplog.at_level("WARNING"):
        assert run.train().global_step == 0
    assert "is spent after 4 steps" in caplog.text
    assert run.engine.accountant.ledger.steps == 4


def test_model_init_starts_another_run_on_the_same_ledger(tmp_path):
    run = PrivateTrainer(
        args=arguments(tmp_path, max_steps=2),
        model_init=Classifier,
        privacy=PrivacyArguments(DELTA, 1.0, BATCH, noise_multiplier=1.5),
        train_dataset=records(),
    )
    run.train()
    first = run.model
    run.train()
    assert run.model is not first
    assert run.engine.accountant.ledger.steps == 4


def test_nothing_of_the_raw_data_is_logged(tmp_path):
    """Neither the loss nor how much was drawn, in logs, results and saved states."""
    run = trainer(tmp_path, save_strategy="steps", save_steps=2, max_steps=4)
    result = run.train()
    assert math.isnan(result.training_loss)
    assert set(result.metrics).isdisjoint({"train_loss", "total_flos"})
    public = {"learning_rate", "epsilon", "epoch", "step", "train_runtime"} | {
        f"train_{what}_per_second" for what in ("samples", "steps")
    }
    state = json.loads((tmp_path / "checkpoint-4/trainer_state.json").read_text())
    assert set().union(*run.state.log_history, *state["log_history"]) <= public
    assert state["total_flos"] == 0


def test_checkpoints_do_not_tell_how_far_dropout_has_wound_the_generator_on(tmp_path):
    """The seed is public and a mask is drawn for every record: the generator's state counts the records drawn."""
    saves = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    trainer(tmp_path / "private", **saves).train()
    transformers.Trainer(Classifier(), arguments(tmp_path / "plain", **saves), train_dataset=records()).train()
    assert not list((tmp_path / "private").rglob("rng_state*"))
    assert list((tmp_path / "plain").rglob("rng_state*"))  # negative control: it is the name of the file


def test_the_loss_is_logged_when_asked_for_and_named_for_what_it_is(tmp_path):
    run = trainer(tmp_path, privacy={"unsafe_diagnostics": True}, max_steps=4)
    result = run.train()
    logged = [entry for entry in run.state.log_history if "unsafe_loss" in entry]
    assert len(logged) == 2
    assert 0.5 < logged[0]["unsafe_loss"] < 3
    assert 0.5 < result.training_loss < 3
    assert not any("loss" in entry for entry in run.state.log_history)


def test_evaluation_and_the_best_model_work_as_always(tmp_path):
    run = trainer(
        tmp_path,
        others={"eval_dataset": records(20)},
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        max_steps=4,
        load_best_model_at_end=True,
    )
    run.train()
    assert sum("eval_loss" in entry for entry in run.state.log_history) == 2
    assert run.evaluate()["eval_loss"] > 0


def test_empty_batches_are_steps(tmp_path):
    run = trainer(tmp_path, privacy={"expected_batch_size": 0.5}, max_steps=12)
    assert run.train().global_step == 12
    assert run.epsilon == accounting.epsilon(1.5, 0.5 / RECORDS, 12, DELTA)


@pytest.mark.filterwarnings("ignore:no rule for Conv1D")
def test_a_language_model_is_trained_on_the_sum_over_tokens(tmp_path):
    """GPT-2's loss over records of different lengths, which is a sum if it is divided by a constant."""
    data = [{"input_ids": t, "labels": t} for t in texts()]
    run = trainer(tmp_path, model=gpt2(), data=data, others={"data_collator": padded}, max_steps=3)
    assert run.train().global_step == 3
    assert run._steps.optimizer.loss_reduction == "sum"


@pytest.mark.filterwarnings("ignore:no rule for Conv1D")
def test_a_mean_over_the_tokens_of_a_batch_is_refused(tmp_path):
    """Negative control for the test above: the loss that transformers would use couples the records."""

    def over_tokens(outputs, labels, num_items_in_batch=None):
        logits, labels = outputs["logits"][:, :-1], labels[:, 1:]
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    data = [{"input_ids": t, "labels": t} for t in texts()]
    others = {"data_collator": padded, "compute_loss_func": over_tokens}
    run = trainer(tmp_path, model=gpt2(), data=data, others=others, max_steps=3)
    with pytest.raises(RehearsalError, match="loss"):
        run.train()
    assert run.engine.accountant.ledger.steps == 0


@pytest.mark.parametrize(
    ("options", "reduction"), [({"label_smoothing_factor": 0.1}, "sum"), ({"bf16": True}, "mean"), ({}, "mean")]
)
def test_bert_with_adapters(tmp_path, options, reduction):
    """With dropout; with label smoothing, which the Trainer computes itself; and in mixed precision."""
    data = [{"input_ids": t, "labels": t[0] % 2} for t in texts()]
    run = trainer(tmp_path, model=bert(), data=data, others={"data_collator": padded}, max_steps=3, **options)
    before = weights(run.model)
    run.train()
    assert run._steps.optimizer.loss_reduction == reduction
    changed = {name for name, value in weights(run.model).items() if not torch.equal(value, before[name])}
    assert changed == {name for name, p in run.model.named_parameters() if p.requires_grad}


def test_gradient_checkpointing_changes_nothing(tmp_path):
    data = [{"input_ids": t, "labels": t[0] % 2} for t in texts()]
    results = []
    for is_on in (False, True):
        torch.manual_seed(0)
        others, more = {"data_collator": padded}, {"max_steps": 3, "gradient_checkpointing": is_on}
        run = trainer(tmp_path, model=bert(**NO_DROPOUT), data=data, engine=seeded(), others=others, **more)
        run.train()
        results.append(weights(run.model))
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value)


def test_a_wrong_reduction_is_refused(tmp_path):
    run = trainer(tmp_path, privacy={"loss_reduction": "sum"}, max_steps=3)
    with pytest.raises(RehearsalError, match="loss_reduction"):
        run.train()


@pytest.mark.parametrize(
    ("options", "fix"),
    [
        ({"gradient_accumulation_steps": 4}, "expected_batch_size"),
        ({"max_grad_norm": 0.3}, "per_sample_max_grad_norm"),
        ({"fp16": True}, "bf16=True"),
        ({"auto_find_batch_size": True}, "lower per_device_train_batch_size"),
        ({"train_sampling_strategy": "group_by_length"}, "Poisson sampling"),
        ({"torch_compile": True}, "leave it out"),
        (
            {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
            '"use_reentrant": False',
        ),
        ({"neftune_noise_alpha": 5.0}, "longest record"),
        ({"include_num_input_tokens_seen": True}, "secret"),
        ({"optim": "schedule_free_adamw"}, "adamw_torch"),
    ],
)
def test_what_cannot_be_done_is_refused_with_what_to_do(tmp_path, options, fix):
    with pytest.raises(ValueError, match=fix):
        trainer(tmp_path, **options)


def test_several_devices_of_one_process_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(transformers.TrainingArguments, "n_gpu", property(lambda self: 2))
    with pytest.raises(ValueError, match="torchrun --nproc-per-node 2"):
        trainer(tmp_path)


@pytest.mark.parametrize("known", [1, 2])
def test_processes_that_do_not_know_each_other_are_refused(tmp_path, monkeypatch, known):
    """Accelerate takes torchrun on CPUs for one process after the other, unless use_cpu is set."""
    monkeypatch.setattr(transformers.TrainingArguments, "world_size", property(lambda self: known))
    monkeypatch.setattr("spectral_dp.integrations.training_arguments.number_of_processes", lambda: 3 - known)
    with pytest.raises(ValueError, match=f"{known} of {3 - known} processes.*use_cpu=True"):
        trainer(tmp_path)


PROGRAM = "tests.support.trainer_programs:transformers_program"


def test_several_processes_train_what_one_trains(tmp_path, processes):
    """From the weights of the first. The model is not wrapped, and the ledger is one; rank 0 writes."""
    alone, _, _, _, logs, _ = trainer_programs.transformers_run(str(tmp_path / "alone"))
    (first, ledger, _, steps, logged, wrapped), (second, other, *_) = processes.run(
        2, PROGRAM, str(tmp_path / "both"), {}, timeout=60.0
    )
    assert (steps, wrapped) == (10, "Classifier")
    assert torch.equal(first, second)
    assert ledger == other
    torch.testing.assert_close(first, alone, rtol=1e-5, atol=1e-6)
    assert logged[-2]["eval_loss"] == pytest.approx(logs[-2]["eval_loss"], rel=1e-4)
    assert not any("loss" in row for row in logged)


def test_negative_control_a_model_that_accelerate_wraps_is_not_trained(tmp_path, processes):
    for error in processes.results(2, "tests.support.trainer_programs:wrapped_by_accelerate", str(tmp_path)):
        assert "has wrapped the model in DistributedDataParallel" in error.message


def test_a_run_goes_on_with_another_number_of_processes(tmp_path, processes):
    whole, *_ = trainer_programs.transformers_run(str(tmp_path / "whole"))
    processes.run(2, PROGRAM, str(tmp_path / "run"), {"epochs": 1}, timeout=60.0)
    resumed, ledger, _, steps, _, _ = trainer_programs.transformers_run(str(tmp_path / "run"), resume=True)
    assert steps == Ledger.from_state_dict(ledger).steps == 10
    torch.testing.assert_close(resumed, whole, rtol=1e-5, atol=1e-6)


def test_a_budget_stops_all_processes(tmp_path, processes):
    """With the noise of a private run. Weights differ between ranks if one of them keeps its share to itself."""
    options = {"privacy": {"target_epsilon": 3.0}, "seed": None, "epochs": 1}
    (first, ledger, spent, steps, _, _), (second, other, *_) = processes.run(
        2, PROGRAM, str(tmp_path), options, timeout=60.0
    )
    assert torch.equal(first, second)
    assert (steps, ledger) == (5, other)
    assert 2.9 < spent <= 3.0
    statement = json.loads((tmp_path / "checkpoint-5" / "privacy.json").read_text())
    assert (statement["processes"], statement["epsilon"]) == (2, spent)


def test_a_search_is_refused(tmp_path):
    with pytest.raises(NotImplementedError, match="nobody would account for"):
        trainer(tmp_path).hyperparameter_search()


def test_the_arguments_of_the_user_are_not_changed(tmp_path):
    args = arguments(tmp_path)
    before = args.to_dict()
    PrivateTrainer(Classifier(), args, privacy=PrivacyArguments(DELTA, 1.0, BATCH, 2.0), train_dataset=records())
    assert args.to_dict() == before


@pytest.mark.parametrize("both", [{"target_epsilon": 1.0}, {"noise_multiplier": None}])
def test_a_target_or_a_multiplier_must_be_given(tmp_path, both):
    with pytest.raises(ValueError, match="one of them"):
        trainer(tmp_path, privacy=both).train()


def test_training_again_draws_from_the_data_set_that_is_there_now(tmp_path):
    """It went on with the records of the first training, whatever ``train_dataset`` said."""
    run = trainer(tmp_path)
    run.train()
    run.train_dataset = records(2 * BATCH)
    run.train()
    assert [phase[1:] for phase in run.engine.accountant.history] == [(BATCH / RECORDS, 10), (0.5, 4)]
