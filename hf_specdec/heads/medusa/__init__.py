"""Medusa heads: small networks on the last hidden state, each of which predicts a token further ahead.

Two kinds with the same settings: independent ones (Medusa, arXiv:2401.10774) and sequential ones (Hydra,
arXiv:2402.05109).
"""

from __future__ import annotations

from ..kind import Accuracy, CardText, HeadKind, Reader, Table
from .config import MedusaConfig
from .formats import FILES, export_vllm, read_heads
from .learning import accuracy_along, task_of
from .network import BoundHeads, new_heads

_PRINCIPLES = {
    "independent": "Every head sees the last hidden state alone (Medusa, arXiv:2401.10774).",
    "sequential": (
        "Every head goes on from the head before it and sees the token drafted there\n(Hydra, arXiv:2402.05109{tied})."
    ),
}
_TAGS = {"independent": ("medusa",), "sequential": ("medusa", "hydra")}


def _card(config: MedusaConfig) -> CardText:
    tied = config.tied_heads
    blocks = f"{config.num_layers} residual block{'s' if config.num_layers > 1 else ''}"
    return CardText(
        title=f"{config.head_type.capitalize()} draft heads",
        shape=f"{config.num_heads} heads{', all one and the same,' if tied else ''} of {blocks}",
        principle=_PRINCIPLES[config.head_type].format(tied="; tied as in ReDrafter, arXiv:2403.09919" if tied else ""),
        tags=_TAGS[config.head_type],
    )


def _kind(head_type: str) -> HeadKind:
    return HeadKind(
        name=head_type,
        config=MedusaConfig,
        preset={"head_type": head_type},
        network=new_heads,
        bind=BoundHeads,
        mode="medusa",
        task=task_of,
        accuracy=lambda heads, answers, progress: Accuracy(accuracy_along(heads, answers)),
        tables=(
            Table(
                "acceptance",
                "Mean acceptance length of the heads alone, tokens per forward of the base model, with trees of so "
                "many drafted tokens",
                settings={"prompt_lookup": False},
            ),
            Table(
                "acceptance_with_lookup",
                "The same where candidates from earlier in the text share the trees, as they do in mode `medusa`",
                settings={"prompt_lookup": True},
            ),
        ),
        called="Medusa heads",
        card=_card,
        reader=_READER,
        writers={"vllm": export_vllm},
    )


_READER = Reader(FILES, read_heads)
KINDS = (_kind("independent"), _kind("sequential"))
