"""A trained exit: a decoder layer on the hidden state at an early exit (Kangaroo, arXiv:2404.18911)."""

from __future__ import annotations

from ..kind import CardText, HeadKind, Table
from .config import TrainedExitConfig
from .learning import accuracy_along, task_of
from .network import BoundExit, check_exit_layer, new_exit


def _card(config: TrainedExitConfig) -> CardText:
    return CardText(
        title="A trained early exit",
        shape=f"A decoder layer on the hidden states above layer {config.exit_layer}",
        principle="It stands in for the layers above while drafting (Kangaroo, arXiv:2404.18911).",
        tags=("early-exit", "kangaroo"),
    )


KIND = HeadKind(
    name="exit",
    config=TrainedExitConfig,
    network=new_exit,
    bind=BoundExit,
    mode="early_exit",
    check_base=check_exit_layer,
    task=task_of,
    accuracy=accuracy_along,
    tables=(
        Table(
            "first_token",
            "Share of the tokens that are predicted right, which is the acceptance of a draft's first token",
            columns=("norm and LM head alone", "trained"),
        ),
    ),
    called="trained exit",
    card=_card,
    head_name="exit",
    first_ahead=1,
)
