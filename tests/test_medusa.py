"""`medusa`: what the heads are given, which trees they draft, and that it costs no forward of the target."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import add_heads, assert_same, model_with_heads, prompt
from transformers import LogitsProcessorList

import hf_specdec
from hf_specdec import MedusaDrafter, MedusaModeConfig
from hf_specdec.context import Context
from hf_specdec.draft import LAST_HIDDEN, Budget, Draft, Scores
from hf_specdec.heads import find_heads
from hf_specdec.sampling import NoiseTape, Selection
from hf_specdec.testing import tiny_model

HEAD_TYPES = ["independent", "sequential"]


@pytest.fixture(params=HEAD_TYPES)
def model(request: pytest.FixtureRequest) -> Any:
    return model_with_heads("llama", request.param)


def asked(**config: Any) -> dict[str, Any]:
    return {"speculative_mode": "medusa", "speculative_config": config}


def context_of(texts: list[list[int]], **selection: Any) -> Context:
    return Context(
        tokens=texts,
        prompt_lengths=[len(text) for text in texts],
        finished=[False] * len(texts),
        device=torch.device("cpu"),
        selection=Selection(LogitsProcessorList(), **{"do_sample": False, "tape": None, **selection}),
        padded_prompts=torch.tensor(texts),
    )


def budget(nodes: int, depth: int, rows: int = 1, trees: bool = True) -> Budget:
    return Budget(depth=[depth] * rows, room=[depth] * rows, nodes=nodes, trees=trees, pays=lambda chains: True)


def proposed(drafter: MedusaDrafter, context: Context, hidden: torch.Tensor, budget: Budget) -> Draft:
    """What is drafted from these last hidden states `[B, d]`."""
    drafter.start(context)
    prompt = Scores(logits=torch.empty(0), rows=list(range(len(hidden))), hidden={LAST_HIDDEN: hidden[:, None]})
    drafter.attach(None, prompt)  # type: ignore[arg-type]
    return drafter.propose(context, budget)


def reference(model: Any, hidden: torch.Tensor, root: int, path: tuple[int, ...]) -> torch.Tensor:
    """Probabilities `[V]` of the token below a path, computed by the formulas, from the weights alone."""
    heads = find_heads(model)
    weights = {key: tensor.double() for key, tensor in heads.heads.state_dict().items()}
    embedding, output = model.get_input_embeddings().weight.double(), model.get_output_embeddings().weight.double()
    x = hidden.double()
    for head in range(len(path) + 1) if heads.is_sequential else [len(path)]:
        seen = x
        if heads.is_sequential:
            before = embedding[(root, *path)[head]]
            seen = torch.cat([x, before / before.square().mean().sqrt()])
        update = weights[f"heads.{head}.layers.0.linear.weight"] @ seen + weights[f"heads.{head}.layers.0.linear.bias"]
        x = x + update / (1 + (-update).exp())
    return (output @ x).softmax(-1)


# ---------------------------------------------------------------- trees


@pytest.mark.parametrize("nodes", [1, 2, 5, 9, 20])
def test_the_tree_holds_the_likeliest_paths(model: Any, nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against all paths of up to three of the ten best tokens, computed one by one."""
    monkeypatch.setattr("hf_specdec.drafters.medusa._BEAM", nodes)
    hidden, root = torch.randn(32, generator=torch.Generator().manual_seed(1)), 17
    drafter = MedusaDrafter(find_heads(model), MedusaModeConfig())
    with torch.no_grad():
        draft = proposed(drafter, context_of([[5, root]]), hidden[None], budget(nodes, depth=3))
        reached: dict[tuple[int, ...], float] = {(): 1.0}
        frontier: list[tuple[int, ...]] = [()]
        for _ in range(3):
            below = []
            for path in frontier:
                best = reference(model, hidden, root, path).topk(10)
                for token, probability in zip(best.indices.tolist(), best.values.tolist(), strict=True):
                    reached[(*path, token)] = reached[path] * probability
                    below.append((*path, token))
            frontier = below
    likeliest = sorted(reached, key=lambda path: -reached[path])[: nodes + 1]
    drafted: dict[int, tuple[int, ...]] = {0: ()}
    for node in range(1, draft.width):
        drafted[node] = (*drafted[draft.parents[0][node]], draft.tokens[0][node])
    assert set(drafted.values()) == set(likeliest)
    for node, path in drafted.items():
        if path:
            assert draft.confidence is not None
            expected = reached[path] / reached[path[:-1]]
            assert draft.confidence[0][node] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("nodes", "beam"), [(20, 5), (40, 10)])
def test_a_level_goes_on_from_the_likeliest_nodes_alone(model: Any, nodes: int, beam: int) -> None:
    """These heads are unsure, so that many nodes are about equally likely."""
    hidden = torch.randn(32, generator=torch.Generator().manual_seed(1))
    drafter = MedusaDrafter(find_heads(model), MedusaModeConfig())
    draft = proposed(drafter, context_of([[5, 17]]), hidden[None], budget(nodes, depth=2))
    first = [node for node, parent in enumerate(draft.parents[0]) if parent == 0]
    gone_on = {parent for parent in draft.parents[0] if parent > 0}
    assert draft.confidence is not None
    likeliest = sorted(first, key=lambda node: -draft.confidence[0][node])
    assert gone_on <= set(likeliest[:beam])
    assert len(gone_on) > 1


def test_static_trees_hold_the_ranks_they_are_made_of(model: Any) -> None:
    hidden, root = torch.randn(32, generator=torch.Generator().manual_seed(2)), 9
    tree = [[0], [2], [0, 1], [0, 0], [2, 0], [0, 0, 3]]
    drafter = MedusaDrafter(find_heads(model), MedusaModeConfig(tree=tree))
    draft = proposed(drafter, context_of([[5, root]]), hidden[None], budget(6, depth=3))
    expected = set()
    for ranks in tree:
        path: tuple[int, ...] = ()
        for rank in ranks:
            path = (*path, int(reference(model, hidden, root, path).topk(10).indices[rank]))
        expected.add(path)
    drafted: dict[int, tuple[int, ...]] = {0: ()}
    for node in range(1, draft.width):
        drafted[node] = (*drafted[draft.parents[0][node]], draft.tokens[0][node])
    assert set(drafted.values()) - {()} == expected
    stats = assert_same(model, prompt(2, padding=2), asked(tree=tree), max_new_tokens=20, eos_token_id=None)
    assert max(stats.widths) == 7


def test_a_chain_where_trees_are_of_no_use(model: Any) -> None:
    hidden = torch.randn(2, 32)
    drafter = MedusaDrafter(find_heads(model))
    draft = proposed(drafter, context_of([[5, 6], [7, 8]]), hidden, budget(3, depth=3, rows=2, trees=False))
    assert draft.is_chain
    assert draft.width == 4


def test_rows_that_are_finished_or_full_get_nothing(model: Any) -> None:
    drafter = MedusaDrafter(find_heads(model))
    context = context_of([[5, 6], [7, 8], [9, 4]])
    context.finished[0] = True
    limits = Budget(depth=[3, 0, 2], room=[3, 0, 2], nodes=4, trees=True, pays=lambda chains: True)
    draft = proposed(drafter, context, torch.randn(3, 32), limits)
    assert [len(row) for row in draft.tokens] == [1, 1, 5]
    assert [row[0] for row in draft.tokens] == [6, 8, 4]


def test_only_tokens_of_the_map_are_drafted() -> None:
    model = add_heads(tiny_model("llama"), "sequential", fitted=False, draft_vocab_size=12)
    heads = find_heads(model)
    chosen = [4, 8, 15, 16, 23, 42, 50, 60, 70, 80, 90, 96]
    assert heads.token_map is not None
    heads.token_map.copy_(torch.tensor(chosen))
    drafter = MedusaDrafter(heads)
    draft = proposed(drafter, context_of([[5, 6]]), torch.randn(1, 32), budget(20, depth=3))
    assert set(draft.tokens[0][1:]) <= set(chosen)
    assert draft.width == 21
    assert_same(model, prompt(3, padding=2), asked(num_draft_tokens=9), max_new_tokens=20, do_sample=True, top_k=20)


def test_tied_heads_draft_as_copies_of_one_head_would() -> None:
    tied = add_heads(tiny_model("llama"), fitted=False, tied_heads=True, num_layers=2, num_heads=4)
    copies = add_heads(tiny_model("llama"), fitted=False, num_layers=2, num_heads=4)
    one, four = find_heads(tied), find_heads(copies)
    assert 4 * sum(weight.numel() for weight in one.heads.parameters()) == sum(
        weight.numel() for weight in four.heads.parameters()
    )
    for head in four.heads.heads:
        head.load_state_dict(one.heads.heads[0].state_dict())
    context, hidden = context_of([[5, 6]]), torch.randn(1, 32)
    drafts = [proposed(MedusaDrafter(heads), context, hidden, budget(20, depth=4)) for heads in (one, four)]
    assert drafts[0] == drafts[1]
    assert max(hf_specdec.tree.depths(drafts[0].parents[0])) == 4
    assert_same(tied, prompt(3, padding=2), asked(num_draft_tokens=9), max_new_tokens=20, do_sample=True)


def test_sampling_reads_the_tape(model: Any) -> None:
    """The first candidate is the argmax of q / E, so heads that say what the model says would always be right."""
    torch.manual_seed(3)
    tape = NoiseTape(prompt_length=2)
    tape.shape_from(torch.zeros(1, 97))
    tape.alone = True
    hidden = torch.randn(1, 32)
    context = context_of([[5, 6]], do_sample=True, tape=tape)
    draft = proposed(MedusaDrafter(find_heads(model)), context, hidden, budget(1, depth=1))
    with torch.no_grad():
        expected = (reference(model, hidden[0], 6, ()) / tape.noise(0)[0].double()).argmax()
    assert draft.tokens[0][1] == int(expected)
    greedy = MedusaDrafter(find_heads(model), MedusaModeConfig(draft_sampling="greedy"))
    draft = proposed(greedy, context, hidden, budget(1, depth=1))
    assert draft.tokens[0][1] == int(reference(model, hidden[0], 6, ()).argmax())


def test_what_the_text_said_before_shares_the_tree(model: Any) -> None:
    """A loop of the text runs on below the heads' own candidates, deeper than there are heads."""
    text = [5, 6, 7, 8, 5, 6, 7, 8, 5, 6]
    context = context_of([text])
    hidden = torch.randn(1, 32, generator=torch.Generator().manual_seed(4))

    def paths(config: MedusaModeConfig, **limits: Any) -> set[tuple[int, ...]]:
        drafter = MedusaDrafter(find_heads(model), config)
        draft = proposed(drafter, context, hidden, budget(**limits))
        assert draft.width <= limits["nodes"] + 1
        assert draft.is_chain or limits.get("trees", True)
        found: dict[int, tuple[int, ...]] = {0: ()}
        for node in range(1, draft.width):
            found[node] = (*found[draft.parents[0][node]], draft.tokens[0][node])
        return set(found.values())

    alone = paths(MedusaModeConfig(prompt_lookup=False), nodes=30, depth=6)
    together = paths(MedusaModeConfig(), nodes=30, depth=6)
    said = {(7, 8, 5, 6, 7, 8)[:depth] for depth in range(7)}
    assert said <= together
    assert not said <= alone
    assert len(together & alone) > 15  # the heads' best are still there
    assert paths(MedusaModeConfig(), nodes=30, depth=6, trees=False) == said
    static = MedusaModeConfig(tree=[[0], [1]])
    assert len(paths(static, nodes=2, depth=6)) == 3


def test_heads_are_left_alone_when_only_what_is_free_is_asked_for(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    text = [5, 6, 7, 8, 5, 6, 7, 8, 5, 6]
    context = context_of([text])
    hidden = torch.randn(1, 32, generator=torch.Generator().manual_seed(4))
    drafter = MedusaDrafter(find_heads(model))
    monkeypatch.setattr(type(drafter.heads), "step", None)
    monkeypatch.setattr(type(drafter.heads), "all_states", None)
    draft = proposed(drafter, context, hidden, replace(budget(nodes=4, depth=4), free_only=True))
    assert drafter.drafts_for_free
    assert draft.tokens[0] == [6, 7, 8, 5, 6]
    alone = MedusaDrafter(find_heads(model), MedusaModeConfig(prompt_lookup=False))
    assert proposed(alone, context, hidden, replace(budget(nodes=4, depth=4), free_only=True)).is_empty
    assert not alone.drafts_for_free
