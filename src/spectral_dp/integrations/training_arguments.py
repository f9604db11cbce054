"""The arguments of private training with transformers, and which of the Trainer's own do not go with it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from spectral_dp.integrations.logical_steps import refuse_problems
from spectral_dp.mechanism.release import number_of_processes


@dataclass
class PrivacyArguments:
    """What private training adds to ``TrainingArguments``. ``HfArgumentParser`` can fill it from a command line.

    Attributes:
        target_delta: The ``δ`` at which epsilon is planned and reported.
        per_sample_max_grad_norm: The bound that the gradient of every sample is clipped to.
        expected_batch_size: How many records a step draws on average. ``per_device_train_batch_size`` only says how
            many of them are in memory at once.
        target_epsilon: The ``ε`` to spend over the whole training, which stops there. Give this or a noise multiplier.
        noise_multiplier: ``σ``.
        clipping: ``"flat"``, ``"per_layer"`` or ``"automatic"``.
        noise_allocation: For ``"per_layer"``: uniform noise, or the least in total.
        loss_reduction: Whether the loss is the sum or the mean over the records of a batch; ``"auto"`` finds out.
        rehearsal: See ``PrivacyEngine.make_private``.
        unsafe_diagnostics: Log the training loss, as ``unsafe_loss``. It is a figure of the raw data that no budget
            covers, so whoever sees it must be allowed to see the data.
    """

    target_delta: float = field(metadata={"help": "The delta at which epsilon is planned and reported."})
    per_sample_max_grad_norm: float = field(metadata={"help": "The bound of the gradient of every sample."})
    expected_batch_size: float = field(metadata={"help": "How many records a step draws on average."})
    target_epsilon: float | None = field(default=None, metadata={"help": "The epsilon to spend."})
    noise_multiplier: float | None = field(default=None, metadata={"help": "Noise over clipping bound."})
    clipping: Literal["flat", "per_layer", "automatic"] = "flat"
    noise_allocation: Literal["uniform", "optimal"] = "uniform"
    loss_reduction: Literal["auto", "mean", "sum"] = "auto"
    rehearsal: bool = True
    unsafe_diagnostics: bool = field(default=False, metadata={"help": "Log the training loss, which is not private."})


def refuse_arguments(args: Any) -> None:
    """Raises ``ValueError`` if the Trainer is told to do what private training cannot do, with what to do instead."""
    from transformers import TrainingArguments  # late: takes seconds, and the extra has it

    defaults = {f.name: f.default for f in fields(TrainingArguments)}
    optim = str(getattr(args.optim, "value", args.optim))
    problems = {
        f"gradient_accumulation_steps={args.gradient_accumulation_steps}": (
            args.gradient_accumulation_steps != 1,
            "leave it at 1: PrivacyArguments.expected_batch_size is the size of a whole step, and "
            "per_device_train_batch_size how much of it is in memory at once",
        ),
        f"max_grad_norm={args.max_grad_norm}": (
            args.max_grad_norm not in (None, 0, defaults["max_grad_norm"]),
            "it clips the gradient of the batch: leave it out, and set PrivacyArguments.per_sample_max_grad_norm",
        ),
        "fp16": (args.fp16, "its scaler skips steps by what the batch holds: use bf16=True"),
        "auto_find_batch_size": (
            args.auto_find_batch_size,
            "it begins again after steps that have been released: lower per_device_train_batch_size, which only "
            "affects memory",
        ),
        f"train_sampling_strategy={args.train_sampling_strategy!r}": (
            args.train_sampling_strategy != defaults["train_sampling_strategy"],
            "leave it out: Poisson sampling draws the batches",
        ),
        "torch_compile": (args.torch_compile, "leave it out: per-sample gradients are recorded layer by layer"),
        "gradient_checkpointing with use_reentrant": (
            args.gradient_checkpointing and bool((args.gradient_checkpointing_kwargs or {}).get("use_reentrant")),
            'it runs a backward pass for every part: use gradient_checkpointing_kwargs={"use_reentrant": False}',
        ),
        "neftune_noise_alpha": (
            args.neftune_noise_alpha is not None,
            "leave it out: its scale depends on the longest record of a batch, so records would meet",
        ),
        "use_liger_kernel": (args.use_liger_kernel, "leave it out: its losses and layers are fused over the batch"),
        "include_num_input_tokens_seen": (
            args.include_num_input_tokens_seen not in (False, "no"),
            "leave it out: how many tokens were drawn is as secret as the records",
        ),
        f"optim={optim!r}": (
            "lomo" in optim or "layerwise" in optim or "schedule_free" in optim,
            'it updates weights during the backward pass or needs to be told of evaluation: use "adamw_torch" or "sgd"',
        ),
        "several devices in one process": (
            args.n_gpu > 1,
            "start one process for each device (torchrun --nproc-per-node 2 script.py), or set CUDA_VISIBLE_DEVICES=0",
        ),
        "DeepSpeed, FSDP or tensor parallelism": (
            bool(args.deepspeed) or bool(args.fsdp) or bool(getattr(args, "parallelism_config", None)),
            "leave it out: the model must fit into each process",
        ),
        f"{args.world_size} of {number_of_processes()} processes": (
            args.world_size != number_of_processes(),
            "this Trainer does not know of the others, and each would write its own files: start them with torchrun, "
            "and on CPUs set use_cpu=True",
        ),
    }
    refuse_problems("what TrainingArguments says", problems)
