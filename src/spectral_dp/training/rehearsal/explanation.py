"""The error messages of a failed rehearsal: where one record affects another, and how to change that."""

from __future__ import annotations

from typing import Literal

from spectral_dp.training.rehearsal.trace import Meeting

_OFF = "If you are sure that records do not meet, make_private(rehearsal=False) takes your word for it"

_LOSS = (
    "every module of the model gives a record the same beside other records, so it is the loss (or a hook of the "
    "backward pass, or code before the model that mixes others) that makes them meet. A loss must be the sum or the "
    "plain mean of one term a record: means over the labels that are not ignored, class weights, contrastive "
    "losses and statistics over the batch are not. Divide by a constant instead, with reduction='sum' and "
    "loss_reduction='sum'"
)


def wrong_reduction(announced: Literal["mean", "sum"]) -> str:
    """Returns the message for a loss that is a sum although a mean was announced, or the reverse."""
    other = "sum" if announced == "mean" else "mean"
    return (
        f"the loss is a {other} over the batch, but loss_reduction={announced!r} was announced, so every gradient is "
        f"clipped at the wrong scale: pass loss_reduction={other!r} to make_private, or reduction={announced!r} to the "
        "loss"
    )


def depends_on_mates(met: Meeting | None, views: int) -> str:
    """Returns the message for a gradient that changes with the contents of other records."""
    return f"records are not treated one by one: {_where(met, views)}. {_OFF}"


def depends_on_size(met: Meeting | None, views: int) -> str:
    """Returns the message for a gradient that changes with the number or length of other records."""
    return f"the gradient of a record changes with the number or length of the others: {_where(met, views)}. {_OFF}"


def cannot_tell() -> str:
    """Returns the message for a loop in which random numbers cannot be told from an effect of other records."""
    return (
        "a record is not the same beside other records, and it cannot be told whether they change it or only which "
        "random numbers it is given: how many are drawn depends on what records hold, and too few records were found "
        "that draw alike. Draw them where a record is by itself, in the dataset's __getitem__, or as many for every "
        f"record. {_OFF}"
    )


def _where(met: Meeting | None, views: int) -> str:
    if met is None:
        return _LOSS
    if met.at_input and met.is_first:
        return f"what the loop feeds into the model for a record depends on the others{_before_the_model(views)}"
    module = f"{met.name or 'the model itself'} ({met.kind})"
    if met.at_input:
        return (
            f"a record reaches {module} changed by other records: look at the code just before it for statistics over "
            "the batch (x.mean(0), F.batch_norm), for rows that are sorted or mixed, and for padding that is not masked"
        )
    return (
        f"{module} gives a record another output beside other records: replace statistics over the batch by those of "
        "one record (GroupNorm, LayerNorm), keep rows in their places, and mask padding"
    )


def _before_the_model(views: int) -> str:
    if views > 1:
        return (
            f". The {views} views of a record must lie next to each other: use x.repeat_interleave({views}, 0), and "
            "likewise for the labels, rather than x.repeat"
        )
    return ": look at collate_fn and the code before the model for statistics over the batch and rows that move"
