"""What a model can take part in: token trees, only chains, or nothing. Structure first, then a cheap self-test.

Some architectures accept a tree mask and silently ignore it. So the first use of a model compares the scores of a
small tree, before and after a rollback, with the scores of the same tokens in a row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn

from ..errors import UnsupportedCacheError, UnsupportedModelError
from ..host.names import CACHE_KEY
from . import kv_cache as kv
from .halves import Halves
from .hidden import watch_head

# Attention back ends that read a dense 4-D mask, and the form each wants it in
DENSE_MASKS = {"eager": "additive", "sdpa": "boolean"}

# what a model may raise when a forward is not made for it
_FOREIGN = (RuntimeError, ValueError, IndexError, TypeError, AttributeError, KeyError)
# config entries about windows that the masks made here follow, or that only say which layers have one
_KNOWN_WINDOWS = {
    "sliding_window",
    "max_window_layers",
    "use_sliding_window",
    "sliding_window_pattern",
    "_sliding_window_pattern",
}


@dataclass(frozen=True)
class MaskKind:
    """One mask of a forward: which layers read it."""

    # key in the mask dictionary; None where the model takes a single mask
    key: str | None
    # the layers that read this mask
    layers: tuple[int, ...]
    # keys further back than this are invisible; None for full attention
    window: int | None


@dataclass(frozen=True)
class Support:
    """How a model may be used. `why` says what stands against trees."""

    trees: bool
    # rows may keep different slots; otherwise they advance together
    movable: bool
    masks: tuple[MaskKind, ...]
    why: str | None = None


_known: WeakKeyDictionary[nn.Module, dict[tuple, Support]] = WeakKeyDictionary()
_shows_last_hidden: WeakSet[nn.Module] = WeakSet()
_known_halves: WeakKeyDictionary[nn.Module, dict[tuple, bool]] = WeakKeyDictionary()


def support(model: Any) -> Support:
    """What `model` supports, tested once per model, attention back end, dtype and device.

    Raises:
        UnsupportedModelError: not even a chain of drafted tokens can be verified and rolled back.
    """
    check_structure(model)
    config = model.config.get_text_config(decoder=True)
    key, per_model = _state(model), _known.setdefault(model, {})
    if key not in per_model:
        with _own_generators(model):
            per_model[key] = _examine(model, config)
    return per_model[key]


def halves_agree(model: Any, exit_layer: int) -> bool:
    """Whether the layers below an exit and those above it, run one after the other, are the model.

    Tested once per model, exit, attention back end, dtype and device.
    """
    abilities = support(model)
    if not abilities.trees:
        return False  # masks for the upper half must be given
    key, per_model = (*_state(model), exit_layer), _known_halves.setdefault(model, {})
    if key not in per_model:
        with _own_generators(model), torch.no_grad():
            reference = _Reference(model, model.config.get_text_config(decoder=True))
            try:
                per_model[key] = reference.halves_agree(abilities, Halves(model, exit_layer))
            except (*_FOREIGN, UnsupportedModelError):
                per_model[key] = False
    return per_model[key]


def check_last_hidden(model: Any) -> None:
    """Raise `UnsupportedModelError` unless the model's LM head shows its last hidden states. Tested once per model."""
    if model not in _shows_last_hidden:
        with _own_generators(model), torch.no_grad(), watch_head(model) as last:
            ids = torch.full((1, 2), model.config.get_text_config(decoder=True).vocab_size // 3, device=model.device)
            logits = model(input_ids=ids, use_cache=False).logits
        assert last.hidden is not None
        if last.hidden.shape[:2] != logits.shape[:2]:
            raise UnsupportedModelError(
                f"{type(model).__name__} gives its LM head something else than a hidden state per token. Use another "
                "speculative_mode."
            )
        _shows_last_hidden.add(model)


def _state(model: Any) -> tuple:
    """What the answers of the tests may depend on."""
    attention = model.config.get_text_config(decoder=True)._attn_implementation
    return attention, model.dtype, str(model.device), model.training, id(vars(model).get("forward"))


def _own_generators(model: Any) -> Any:
    """Leave the global generators alone inside."""
    return torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else [])


def check_structure(model: Any) -> None:
    """Raise `UnsupportedModelError` for models that cannot speculate, as far as their structure tells."""
    name = type(model).__name__
    remedy = "Use a decoder-only attention model, leave out speculative_mode, or pass on_unsupported='plain'."
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(f"{name} is an encoder-decoder model; only decoder-only models speculate. {remedy}")
    prepares = vars(model).get("prepare_inputs_for_generation")
    if prepares is not None and getattr(prepares, "__func__", None) is not type(model).prepare_inputs_for_generation:
        raise UnsupportedModelError(
            f"prepare_inputs_for_generation of this {name} was replaced (PEFT's prompt and prefix tuning do so, to put "
            "tokens of their own before the prompt), so its later forwards cannot be made here. Leave out "
            "speculative_mode, or pass on_unsupported='plain'."
        )
    if getattr(model, "_is_stateful", False) or not model._supports_default_dynamic_cache():
        raise UnsupportedModelError(
            f"{name} keeps a recurrent state that cannot be rolled back after a rejected draft. {remedy}"
        )
    if model.training and _has_dropout(model):
        raise UnsupportedModelError(
            f"{name} is in training mode with dropout, so no two forwards agree. Call model.eval() first."
        )


def _has_dropout(model: Any) -> bool:
    modules = any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())
    return modules or any(
        "drop" in name and isinstance(value, float) and value > 0
        for name, value in vars(model.config.get_text_config(decoder=True)).items()
    )


def check_length(model: Any, shortest: int, longest: int) -> None:
    """Raise `UnsupportedModelError` where rotary frequencies change between these lengths of the text.

    They follow the deepest position of a whole forward, so tokens verified together would not get what each gets in a
    step of its own.
    """
    config = model.config.get_text_config(decoder=True)
    for parameters in _rope_parameters(config):
        kind = parameters.get("rope_type")
        limit = getattr(config, "max_position_embeddings", None)
        if kind == "longrope":
            limit = parameters.get("original_max_position_embeddings") or limit
            # past the border on both ends, all forwards use the same frequencies
            changes = limit is not None and shortest <= limit < longest
        else:
            changes = kind == "dynamic" and limit is not None and longest > limit
        if changes:
            raise UnsupportedModelError(
                f"{type(model).__name__} changes its {kind!r} rotary embedding at {limit} tokens, and this text may "
                f"reach {longest}. Keep prompt and new tokens below that, or pass on_unsupported='plain'."
            )


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """The rotary settings of a config, which may be nested per type of layer."""
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not isinstance(found, dict):
        return []
    return [found, *(value for value in found.values() if isinstance(value, dict))]


def _mask_kinds(config: Any) -> tuple[tuple[MaskKind, ...], str | None]:
    """The masks a forward of this model needs, or why its trees cannot be masked."""
    attention = config._attn_implementation
    if attention not in DENSE_MASKS:
        return (), f"attention back end {attention!r} takes no dense mask"
    if getattr(config, "keep_window_size", None) is not None:
        raise UnsupportedModelError(
            f"Models of type {config.model_type} choose the keys they attend to by what else is scored with them, so a "
            "drafted block has other scores than single steps. Leave out speculative_mode, or pass "
            "on_unsupported='plain'."
        )
    foreign = [
        name
        for name, value in vars(config).items()
        if "window" in name and name not in _KNOWN_WINDOWS and isinstance(value, int) and value
    ]
    if foreign:
        # such a window counts slots inside the model, and is wider than any text that the self-test could afford
        return (), f"a window that is not a sliding_window ({', '.join(foreign)})"
    everywhere = tuple(range(config.num_hidden_layers))
    types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if types is None:
        if getattr(config, "attention_chunk_size", None) is not None:
            return (), "chunked attention"
        return (MaskKind(None, everywhere, window),), None
    unknown = set(types) - {"full_attention", "sliding_attention"}
    if unknown:
        return (), f"layers of type {', '.join(sorted(map(str, unknown)))}"
    kinds = tuple(
        MaskKind(
            kind,
            tuple(index for index, other in enumerate(types) if other == kind),
            window if kind == "sliding_attention" else None,
        )
        for kind in sorted(set(types))
    )
    if len(kinds) == 1:
        return (MaskKind(None, everywhere, kinds[0].window),), None
    return kinds, None


@torch.no_grad()
def _examine(model: Any, config: Any) -> Support:
    masks, why = _mask_kinds(config)
    try:
        reference = _Reference(model, config)
        cache = reference.prefill()
    except UnsupportedModelError:
        raise
    except _FOREIGN as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} failed the self-test with {type(error).__name__}: {error}. Leave out "
            "speculative_mode, or pass on_unsupported='plain'."
        ) from error
    movable = kv.is_movable(cache)
    if masks and movable:
        tree = Support(trees=True, movable=True, masks=masks)
        try:
            agrees = reference.tree_agrees(tree)
        except _FOREIGN as error:
            agrees, why = False, f"a 4-D attention mask raised {type(error).__name__}"
        if agrees:
            return replace(tree, movable=reference.rows_agree(tree))
        why = why or "the self-test's tree scores differ from sequential scores"
    chain = Support(trees=False, movable=movable, masks=(), why=why or "its cache layers cannot be rearranged")
    try:
        agrees = reference.chain_agrees(chain)
    except _FOREIGN:
        agrees = False
    if not agrees:
        raise UnsupportedModelError(
            f"{type(model).__name__} failed the self-test: the scores of a drafted chain, verified in one forward, "
            "differ from the scores of the same tokens one by one. Leave out speculative_mode, or pass "
            "on_unsupported='plain'."
        )
    return replace(chain, movable=movable and reference.rows_agree(chain))


class _Reference:
    """Scores of two short continuations of one prompt, from one forward without a cache."""

    # (tokens are chosen apart from one another and away from the special ids at the ends of most vocabularies)
    PROMPT, LONG, SHORT = 4, 4, 2  # prompt; root, a, b, c; root, d

    def __init__(self, model: Any, config: Any) -> None:
        self.model, self.config = model, config
        vocabulary = config.vocab_size
        ids = [(vocabulary // 3 + 7 * i) % vocabulary for i in range(self.PROMPT + self.LONG + 1)]
        self.prompt, (self.root, self.a, self.b, self.c, self.d) = ids[: self.PROMPT], ids[self.PROMPT :]
        device = model.device
        rows = torch.tensor(
            [
                [*self.prompt, self.root, self.a, self.b, self.c],
                [*self.prompt, self.root, self.d, self.b, self.c],
            ],
            device=device,
        )
        logits = model(input_ids=rows, use_cache=False).logits.float()
        self.long, self.short = logits[0, self.PROMPT :], logits[1, self.PROMPT :]
        reduced = model.dtype in (torch.float16, torch.bfloat16)
        # Root mean square, relative to the spread of the scores. Rounding in bfloat16 comes to 0.07 on a real model, a
        # mask that is ignored to 0.96.
        self.tolerance = (0.25 if reduced else 1e-3) * float(self.long.std().clamp(min=1e-6))

    def prefill(self) -> Any:
        """A cache that holds the prompt. Raises `UnsupportedModelError` where it cannot be rolled back."""
        cache = kv.new_cache(self.config)
        ids = torch.tensor([self.prompt], device=self.model.device)
        output = self.model(input_ids=ids, use_cache=True, **{CACHE_KEY: cache})
        if output.get(CACHE_KEY) is None:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} returns no cache, so drafts cannot be rolled back. Leave out "
                "speculative_mode, or pass on_unsupported='plain'."
            )
        try:
            kv.check_rollback(cache, type(self.model).__name__, total_slots=self.PROMPT + self.LONG)
        except UnsupportedCacheError as error:
            raise UnsupportedModelError(str(error)) from None
        return cache

    def _runner(self, support: Support) -> Any:
        from .cached_model import CachedModel

        return CachedModel(self.model, support, self.prefill(), padding=None, next_position=[self.PROMPT])

    def rows_agree(self, support: Support) -> bool:
        """Whether rows of a batch may advance by different lengths: one keeps root and a, the other only the root."""
        from .cached_model import CachedModel

        try:
            runner, _ = CachedModel.filled(self.model, support, [self.prompt, self.prompt])
            first = runner.forward([[self.root, self.a, self.d]] * 2, [[-1, 0, 1]] * 2).logits
            runner.commit([[0, 1], [0]])
            after = runner.forward([[self.b], [self.a]], [[-1]] * 2).logits
        except _FOREIGN:
            return False
        return (
            self._agree(first[0, :2], self.long[:2])
            and self._agree(after[0], self.long[2:3])
            and self._agree(after[1], self.long[1:2])
        )

    def _agree(self, logits: torch.Tensor, expected: torch.Tensor) -> bool:
        differences = (logits.float() - expected).square().mean(-1).sqrt()  # [n]
        return bool((differences <= self.tolerance).all())  # NaN is not below anything

    def tree_agrees(self, support: Support) -> bool:
        runner = self._runner(support)
        # root -> d, root -> a -> b: then keep root, a, b and go on with c
        output = runner.forward([[self.root, self.d, self.a, self.b]], [[-1, 0, 0, 2]])
        first = output.logits[0]
        runner.commit([[0, 2, 3]])
        after = runner.forward([[self.c]], [[-1]]).logits[0]
        return (
            self._agree(first[[0, 2, 3]], self.long[:3])
            and self._agree(first[1], self.short[1])
            and self._agree(after[0], self.long[3])
        )

    def halves_agree(self, support: Support, halves: Halves) -> bool:
        """As `tree_agrees`; some run through the layers below the exit before it is known what is verified."""
        runner = self._runner(support)
        runner.forward_below(halves, [[self.root]], [[-1]])
        if runner.has_windows:  # drafts are chains there
            runner.forward_below(halves, [[self.a]], [[0]])
            first = runner.forward([[self.root, self.a, self.b]], [[-1, 0, 1]]).logits[0]
            runner.commit([[0, 1]])
            after = runner.forward([[self.b, self.c]], [[-1, 0]]).logits[0]
            return self._agree(first, self.long[:3]) and self._agree(after, self.long[2:])
        runner.forward_below(halves, [[self.d, self.a]], [[0, 0]])
        first = runner.forward([[self.root, self.a, self.b, self.d]], [[-1, 0, 1, 0]]).logits[0]
        runner.commit([[0, 1, 2]])
        after = runner.forward([[self.c]], [[-1]]).logits[0]
        return (
            self._agree(first[:3], self.long[:3])
            and self._agree(first[3], self.short[1])
            and self._agree(after[0], self.long[3])
        )

    def chain_agrees(self, support: Support) -> bool:
        runner = self._runner(support)
        # root -> a -> d: keep root, a and go on with b -> c
        first = runner.forward([[self.root, self.a, self.d]], [[-1, 0, 1]]).logits[0]
        runner.commit([[0, 1]])
        after = runner.forward([[self.b, self.c]], [[-1, 0]]).logits[0]
        return self._agree(first[:2], self.long[:2]) and self._agree(after, self.long[2:4])
