"""Answers on disk. A batch is a shard: an interrupted run goes on where it stopped, and processes share the work."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ..context import Context
from ..draft import Budget, Draft
from ..drafter import Drafter
from ..errors import TrainingDataError
from ..heads.answers import PER_TOKEN, Answers
from ..heads.files import write_whole, written_whole
from .data import DataSettings, answer, joined, say
from .prompts import encode, opening

_MANIFEST = "manifest.json"
# longest prompt that the model makes up, in tokens
_MAX_OWN_PROMPT = 96
# of each weight, that tell a model from others
_VALUES = 64


class _Onlooker(Drafter):
    """Drafts nothing. The loop drops a row once it is finished, which plain decoding does not."""

    def propose(self, context: Context, budget: Budget) -> Draft:
        return Draft.empty(context.roots)


@dataclass(frozen=True)
class _Shard:
    """One batch to answer."""

    name: str
    prompts: list[list[int]]
    do_sample: bool
    seed: int


class AnswerCache:
    """A folder of answers, made shard by shard, and of the prompts that the model made up.

    Args:
        folder: where they are.
        model: the base model.
        tokenizer: its tokenizer.
        prompts: token ids of the prompts that were given.
        settings: how answers are made.

    Raises:
        TrainingDataError: the folder holds answers of another model, to other prompts, or made otherwise.
    """

    def __init__(
        self, folder: Path, model: Any, tokenizer: Any, prompts: list[list[int]], settings: DataSettings
    ) -> None:
        self.folder, self.model, self.tokenizer = folder, model, tokenizer
        self.prompts, self.settings = prompts, settings
        manifest = {
            "model": weights_digest(model),
            "prompts": prompts_digest(prompts),
            "settings": asdict(settings),
        }
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / _MANIFEST
        if path.exists():
            if json.loads(path.read_text(encoding="utf-8")) != json.loads(json.dumps(manifest)):
                raise TrainingDataError(
                    f"{folder} holds answers of another model, to other prompts, or made with other settings. Use "
                    "another folder, or remove it."
                )
        else:
            write_whole(path, json.dumps(manifest, indent=2))

    def batches_to_ask(self) -> list[int]:
        """Sizes of the batches in which the model makes up prompts."""
        whole, rest = divmod(self.settings.own_prompts, self.settings.batch_size)
        return [self.settings.batch_size] * whole + [rest] * (rest > 0)

    def ask(self, batch: int) -> None:
        """Let the model make up one batch of prompts unless that has been done."""
        path = self._asked(batch)
        if path.exists():
            return
        began, start, settings = time.perf_counter(), opening(self.tokenizer), self.settings
        rows = say(
            self.model,
            [start] * self.batches_to_ask()[batch],
            _Onlooker(),
            settings.seed + 200_003 + batch,
            do_sample=True,
            max_new_tokens=min(_MAX_OWN_PROMPT, settings.max_prompt_tokens),
        )
        ends = self.model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        said = [row[len(start) :] for row in rows.tolist()]
        lengths = [next((at for at, token in enumerate(row) if token in ends), None) for row in said]
        finished = [row[:length] for row, length in zip(said, lengths, strict=True) if length]
        texts = [text.strip() for text in self.tokenizer.batch_decode(finished, skip_special_tokens=True)]
        write_whole(path, json.dumps({"prompts": texts, "seconds": time.perf_counter() - began}))

    def own_prompts(self) -> list[list[int]]:
        """Token ids of the prompts that the model made up."""
        said = [text for batch, _ in enumerate(self.batches_to_ask()) for text in self._read_asked(batch)["prompts"]]
        chats = [[{"role": "user", "content": text}] for text in dict.fromkeys(said) if text]
        if not chats:
            if self.settings.own_prompts:
                raise TrainingDataError(
                    f"{type(self.model).__name__} finished none of the {self.settings.own_prompts} prompts that it was "
                    "asked for. Leave own_prompts at 0."
                )
            return []
        return encode(self.tokenizer, chats, self.settings.max_prompt_tokens)

    def shards(self) -> list[_Shard]:
        """Every batch to answer: given prompts before own ones, greedy answers before sampled ones."""
        parts = {"": self.prompts, "own-": self.own_prompts()}
        return [
            shard
            for turn in range(self.settings.answers_per_prompt)
            for name, prompts in parts.items()
            for shard in _shards(name, prompts, self.settings, turn)
        ]

    def make(self, shard: _Shard) -> int:
        """Answer a shard's prompts unless that has been done. Returns the number of tokens."""
        path = self._path(shard)
        if path.exists():
            with safe_open(path, "pt") as opened:
                return int(opened.get_tensor("lengths").sum())
        began = time.perf_counter()
        answers = answer(self.model, shard.prompts, self.settings, shard.do_sample, shard.seed)
        whole = joined(answers, shard.prompts)
        tensors = {name: getattr(whole, name) for name in (*PER_TOKEN, "lengths")}
        tensors["seconds"] = torch.tensor(time.perf_counter() - began)
        with written_whole(path) as temporary:
            save_file(tensors, temporary)
        return int(tensors["lengths"].sum())

    def read(self, max_positions: int | None = None) -> Answers:
        """The shards one after the other, until there are so many positions.

        Where several processes stop at so many each, some of the later ones have not been made.

        Raises:
            TrainingDataError: too many have not been made.
        """
        found: list[tuple[_Shard, dict[str, torch.Tensor]]] = []
        for shard in self.shards():
            if max_positions is not None and sum(len(part["tokens"]) for _, part in found) >= max_positions:
                break
            if max_positions is not None and not self._path(shard).exists():
                continue
            found.append((shard, load_file(self._path(shard))))
        if max_positions is not None and sum(len(part["tokens"]) for _, part in found) < max_positions:
            absent = [shard.name for shard in self.shards() if not self._path(shard).exists()]
            if absent:
                raise TrainingDataError(
                    f"Answers are missing from {self.folder} ({absent[0]} and others). Processes that share the work "
                    "must share that folder too."
                )
        asking = [self._read_asked(batch)["seconds"] for batch, _ in enumerate(self.batches_to_ask())]
        return Answers(
            **{name: torch.cat([part[name] for _, part in found]) for name in (*PER_TOKEN, "lengths")},
            prompts=[prompt for shard, _ in found for prompt in shard.prompts],
            seconds=sum(asking) + sum(float(part["seconds"]) for _, part in found),
        )

    def _path(self, shard: _Shard) -> Path:
        return self.folder / f"{shard.name}.safetensors"

    def _asked(self, batch: int) -> Path:
        return self.folder / f"own-{batch:05d}.json"

    def _read_asked(self, batch: int) -> dict[str, Any]:
        return json.loads(self._asked(batch).read_text(encoding="utf-8"))


def _shards(name: str, prompts: list[list[int]], settings: DataSettings, turn: int) -> Iterator[_Shard]:
    """Batches of prompts of similar length, in an order in which any first part is a fair sample."""
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    size = settings.batch_size
    batches = [order[start : start + size] for start in range(0, len(order), size)]
    generator = torch.Generator().manual_seed(settings.seed + turn)
    for place in torch.randperm(len(batches), generator=generator).tolist():
        yield _Shard(
            name=f"{name}{turn:02d}-{place:05d}",
            prompts=[prompts[index] for index in batches[place]],
            do_sample=turn > 0,
            seed=settings.seed + 100_003 * turn + place,
        )


def make_answers(
    model: Any,
    tokenizer: Any,
    prompts: list[list[int]],
    folder: Path,
    data_settings: DataSettings,
    max_positions: int | None = None,
    progress: bool = True,
) -> Answers:
    """The model's answers to the prompts, from the cache as far as they are there. Processes share the work.

    Args:
        model: the base model.
        tokenizer: its tokenizer.
        prompts: token ids of the prompts.
        folder: of the cache.
        data_settings: how answers are made.
        max_positions: most tokens to answer; None answers all prompts.
        progress: whether to show progress bars.

    Raises:
        TrainingDataError: see `AnswerCache`.
    """
    from accelerate import PartialState
    from tqdm.auto import tqdm

    state = PartialState()
    if state.is_main_process:
        AnswerCache(folder, model, tokenizer, prompts, data_settings)  # writes the manifest once
    state.wait_for_everyone()
    cache = AnswerCache(folder, model, tokenizer, prompts, data_settings)
    quiet, share = not progress or not state.is_main_process, slice(state.process_index, None, state.num_processes)
    for batch in tqdm(range(len(cache.batches_to_ask()))[share], desc="own prompts", unit="batch", disable=quiet):
        cache.ask(batch)
    state.wait_for_everyone()
    mine = cache.shards()[share]
    tokens, most = 0, max_positions
    with tqdm(total=len(mine), desc="answers", unit="batch", disable=quiet) as bar:
        for shard in mine:
            if most is not None and tokens * state.num_processes >= most:
                break
            tokens += cache.make(shard)
            bar.update()
            bar.set_postfix(tokens=tokens)
    state.wait_for_everyone()
    return cache.read(most)


def prompts_digest(prompts: list[list[int]]) -> str:
    """Tells prompts from others."""
    return hashlib.sha256(json.dumps(prompts).encode()).hexdigest()


@torch.no_grad()
def weights_digest(model: Any) -> str:
    """Tells a model from others, by some values of each of its weights."""
    found = hashlib.sha256()
    for name, weight in model.named_parameters():
        found.update(f"{name} {list(weight.shape)}".encode())
        if weight.numel() and not weight.is_meta:  # as what is offloaded
            flat = weight.detach().flatten()
            places = torch.arange(_VALUES, device=flat.device) * (flat.numel() - 1) // (_VALUES - 1)
            found.update(str(flat[places].float().tolist()).encode())
    return found.hexdigest()
