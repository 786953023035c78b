"""Self-distillation data: the base model answers prompts, and its hidden states are kept as they come by.

Answers are generated in batches by this package's own engine, which drops a row once it is finished and shows every
token's last hidden state to the drafter; `Recorder` is a drafter that drafts nothing and keeps them. So there is no
second pass. Batches are shards on disk: an interrupted run goes on where it stopped, and several processes share the
work.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig

from ..draft import Budget, Context, Draft, Scores, Verdict
from ..drafters.base import Drafter
from ..errors import ConfigurationError, TrainingDataError
from ..heads.checks import base_probe
from ..heads.module import lm_head_shape

_MANIFEST = "manifest.json"
# longest prompt that the model makes up, in tokens
_MAX_OWN_PROMPT = 96
# columns that prompts are looked for in, in this order
_COLUMNS = ("messages", "conversations", "prompt", "turns", "question", "instruction", "text")


@dataclass(frozen=True)
class DataSettings:
    """How answers are made.

    Args:
        own_prompts: prompts that the base model is asked to make up itself, besides those given (Magpie,
            arXiv:2406.08464). Those that it does not finish are left out, and so is what it says twice.
        answers_per_prompt: the first is greedy, the others are sampled.
        max_new_tokens: most tokens of an answer.
        max_prompt_tokens: longer prompts are left out.
        temperature: of the sampled answers.
        top_k_labels: K, tokens kept of the base model's distribution at every position.
        batch_size: prompts answered at once; one shard.
        seed: of the sampled answers.
    """

    own_prompts: int = 0
    answers_per_prompt: int = 2
    max_new_tokens: int = 256
    max_prompt_tokens: int = 1024
    temperature: float = 0.8
    top_k_labels: int = 8
    batch_size: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("answers_per_prompt", "max_new_tokens", "max_prompt_tokens", "top_k_labels", "batch_size"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.own_prompts < 0:
            raise ConfigurationError(f"own_prompts must be at least 0, got {self.own_prompts}.")
        if not self.temperature > 0:
            raise ConfigurationError(f"temperature must be above 0, got {self.temperature}.")


# ---------------------------------------------------------------- prompts


def read_prompts(source: str | Path) -> list[list[dict[str, str]]]:
    """Prompts as chats without the last answer, from a JSON Lines file, a `datasets` folder, or a data set's id.

    A row holds a chat (`messages`, or `conversations` with `from` and `value`), or a prompt (`prompt`, the first of
    `turns`, `question`, `instruction` with perhaps `input`, or `text`).

    Raises:
        TrainingDataError: the source cannot be read, or a row holds none of these.
    """
    rows = _rows(source)
    chats = [_chat(row, f"row {number} of {source}") for number, row in enumerate(rows, start=1)]
    if not chats:
        raise TrainingDataError(f"{source} holds no prompts.")
    return chats


def _rows(source: str | Path) -> list[dict[str, Any]]:
    path = Path(source)
    if path.is_file():
        try:
            return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        except ValueError as error:
            raise TrainingDataError(f"{source} is not JSON Lines: {error}") from error
    try:
        import datasets
    except ImportError:
        raise TrainingDataError(
            f'{source} is no file. Data sets by id or folder need `pip install "hf-specdec[train]"`.'
        ) from None
    try:
        loaded = datasets.load_from_disk(str(path)) if path.is_dir() else datasets.load_dataset(str(source))
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise TrainingDataError(f"{source} cannot be read as a data set: {error}") from error
    if isinstance(loaded, dict):
        loaded = loaded["train"] if "train" in loaded else next(iter(loaded.values()))
    return list(loaded)


def _chat(row: Any, where: str) -> list[dict[str, str]]:
    column = next((name for name in _COLUMNS if isinstance(row, dict) and row.get(name)), None)
    if column is None:
        raise TrainingDataError(f"{where} has no prompt: it needs one of {', '.join(_COLUMNS)}.")
    value = row[column]
    try:
        if column in ("messages", "conversations"):
            return _without_last_answer([_message(message) for message in value])
        text = value[0] if column == "turns" else value
        if column == "instruction" and row.get("input"):
            text = f"{text}\n\n{row['input']}"
    except (KeyError, TypeError, IndexError) as error:
        said = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        raise TrainingDataError(f"{column} of {where} is malformed: {said}.") from error
    if not isinstance(text, str) or not text.strip():
        raise TrainingDataError(f"{column} of {where} holds no text.")
    return [{"role": "user", "content": text}]


def _message(message: dict[str, str]) -> dict[str, str]:
    role = message["role"] if "role" in message else message["from"]
    content = message["content"] if "content" in message else message["value"]
    if isinstance(content, list):  # parts, of which only text can be used
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise TypeError(f"a message without text: {message!r}")
    return {"role": {"human": "user", "gpt": "assistant"}.get(role, role), "content": content}


def _without_last_answer(chat: list[dict[str, str]]) -> list[dict[str, str]]:
    while chat and chat[-1]["role"] == "assistant":
        chat = chat[:-1]
    if not chat:
        raise TypeError("there is no message but the assistant's")
    return chat


def encode(tokenizer: Any, chats: Sequence[list[dict[str, str]]], most: int | None = None) -> list[list[int]]:
    """Token ids of the chats as prompts, in their order, without empty ones and those of more than `most` tokens."""
    if tokenizer.chat_template is not None:
        texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
        ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    else:
        ids = tokenizer(["\n\n".join(message["content"] for message in chat) for chat in chats])["input_ids"]
    return [row for row in ids if row and (most is None or len(row) <= most)]


def opening(tokenizer: Any) -> list[int]:
    """Token ids of what a chat template puts before a user's first words.

    Raises:
        TrainingDataError: the tokenizer has no chat template, or one that hides them.
    """
    marker = "(the user's words)"
    if tokenizer.chat_template is None:
        raise TrainingDataError("Without a chat template a model cannot be asked for prompts. Leave own_prompts at 0.")
    whole = tokenizer.apply_chat_template([{"role": "user", "content": marker}], tokenize=False)
    before, found, _ = whole.partition(marker)
    ids = tokenizer(before, add_special_tokens=False)["input_ids"]
    if not found or not ids:
        raise TrainingDataError("The chat template puts nothing before a user's words. Leave own_prompts at 0.")
    return ids


# ---------------------------------------------------------------- answers


@dataclass
class Answer:
    """What the base model said to one prompt. T tokens; hidden state t gave token t."""

    # [T]
    tokens: torch.Tensor
    # [T, d]
    hidden: torch.Tensor
    # [T, K]: the likeliest tokens where each token was chosen, and their probabilities
    label_tokens: torch.Tensor
    label_probabilities: torch.Tensor


@dataclass(frozen=True)
class Answers:
    """Many answers, one after the other: N tokens in A answers."""

    # [N], [N, d], [N, K], [N, K]: see `Answer`
    tokens: torch.Tensor
    hidden: torch.Tensor
    label_tokens: torch.Tensor
    label_probabilities: torch.Tensor
    # [A]: tokens of every answer
    lengths: torch.Tensor
    # per answer, the token ids of its prompt
    prompts: list[list[int]]
    # what it took to make them
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if len(self.prompts) != len(self.lengths) or len(self.tokens) != int(self.lengths.sum()):
            raise TrainingDataError(
                f"{len(self.tokens)} tokens, {len(self.lengths)} answers and {len(self.prompts)} prompts do not match."
            )

    def split(self, part: float) -> tuple[Answers, Answers]:
        """(training, held-out) answers; all answers to a prompt fall on the same side, in every run."""
        digests = [hashlib.sha256(json.dumps(prompt).encode()).digest()[:4] for prompt in self.prompts]
        held_out = torch.tensor([int.from_bytes(digest, "big") < part * 2**32 for digest in digests])
        return self._pick(~held_out), self._pick(held_out)

    def _pick(self, which: torch.Tensor) -> Answers:
        positions = which.repeat_interleave(self.lengths.long())
        return Answers(
            **{name: getattr(self, name)[positions] for name in _PER_TOKEN},
            lengths=self.lengths[which],
            prompts=[prompt for prompt, picked in zip(self.prompts, which.tolist(), strict=True) if picked],
        )


_PER_TOKEN = ("tokens", "hidden", "label_tokens", "label_probabilities")


def joined(answers: Sequence[Answer], prompts: list[list[int]]) -> Answers:
    """These answers to these prompts, one after the other."""
    tensors: dict[str, Any] = {name: torch.cat([getattr(one, name) for one in answers]) for name in _PER_TOKEN}
    lengths = torch.tensor([len(one.tokens) for one in answers], dtype=torch.int32)
    return Answers(**tensors, lengths=lengths, prompts=prompts)


@dataclass
class _Row:
    hidden: list[torch.Tensor] = field(default_factory=list)
    label_tokens: list[torch.Tensor] = field(default_factory=list)
    label_probabilities: list[torch.Tensor] = field(default_factory=list)


class _Onlooker(Drafter):
    """Drafts nothing. The loop drops a row once it is finished, which plain decoding does not."""

    def propose(self, context: Context, budget: Budget) -> Draft:
        return Draft.empty(context.roots)


class Recorder(Drafter):
    """Drafts nothing, and keeps what the target says at every token.

    Args:
        model: the target.
        top_k_labels: K, tokens kept of each of its distributions.
    """

    needs_hidden: ClassVar[bool] = True

    def __init__(self, model: Any, top_k_labels: int) -> None:
        self.model, self.top_k_labels = model, min(top_k_labels, lm_head_shape(model)[0])
        self._rows: list[_Row] = []
        self._texts: list[list[int]] = []
        self._prompt_lengths: list[int] = []

    def start(self, context: Context) -> None:
        self._rows = [_Row() for _ in context.tokens]
        self._texts, self._prompt_lengths = context.tokens, context.prompt_lengths

    @torch.no_grad()
    def propose(self, context: Context, budget: Budget) -> Draft:
        if context.hidden is not None and not self._rows[0].hidden:  # what the prompts' forward gave
            logits = self.model.get_output_embeddings()(context.hidden)
            self._keep(range(len(self._rows)), context.hidden, logits)
        self._texts = context.tokens
        return Draft.empty(context.roots)

    @torch.no_grad()
    def observe(self, context: Context, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        assert scores.hidden is not None
        index = [place for place, row in enumerate(scores.rows) if verdict.committed[row]]
        self._keep([scores.rows[place] for place in index], scores.hidden[index, 0], scores.logits[index, 0])
        self._texts = context.tokens

    def _keep(self, rows: Sequence[int], hidden: torch.Tensor, logits: torch.Tensor) -> None:
        best = logits.float().softmax(-1).topk(self.top_k_labels)
        parts = (hidden.to(torch.bfloat16).cpu(), best.indices.int().cpu(), best.values.half().cpu())
        for row, state, tokens, probabilities in zip(rows, *parts, strict=True):
            self._rows[row].hidden.append(state)
            self._rows[row].label_tokens.append(tokens)
            self._rows[row].label_probabilities.append(probabilities)

    def answers(self) -> list[Answer]:
        """What was kept of the last call, per row."""
        width, labels = lm_head_shape(self.model)[1], self.top_k_labels
        return [
            Answer(
                tokens=torch.tensor(text[length:], dtype=torch.int32)[: len(row.hidden)],
                hidden=torch.stack([*row.hidden, torch.empty(width, dtype=torch.bfloat16)])[:-1],
                label_tokens=torch.stack([*row.label_tokens, torch.empty(labels, dtype=torch.int32)])[:-1],
                label_probabilities=torch.stack([*row.label_probabilities, torch.empty(labels, dtype=torch.half)])[:-1],
            )
            for row, text, length in zip(self._rows, self._texts, self._prompt_lengths, strict=True)
        ]


def answer(
    model: Any, prompts: Sequence[Sequence[int]], settings: DataSettings, do_sample: bool, seed: int
) -> list[Answer]:
    """The model's answers to prompts (token ids), one batch."""
    recorder = Recorder(model, settings.top_k_labels)
    sampling = {"do_sample": True, "temperature": settings.temperature} if do_sample else {"do_sample": False}
    _say(model, prompts, recorder, seed, max_new_tokens=settings.max_new_tokens, **sampling)
    return recorder.answers()


@torch.no_grad()
def _say(model: Any, prompts: Sequence[Sequence[int]], drafter: Drafter, seed: int, **settings: Any) -> torch.Tensor:
    """What the model says to prompts (token ids), one batch padded on the left; a drafter looks on."""
    longest = max(map(len, prompts))
    own = model.generation_config
    pad = 0 if own.pad_token_id is None else own.pad_token_id
    ends = {name: getattr(own, name) for name in ("bos_token_id", "eos_token_id")}
    device = model.device
    ids = torch.tensor([[pad] * (longest - len(row)) + list(row) for row in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in prompts], device=device)
    # the model's distribution as it is: penalties and the like of its generation config stay out
    plainly = GenerationConfig(**ends, pad_token_id=pad, **settings)
    torch.manual_seed(seed)
    return model.generate(
        input_ids=ids,
        attention_mask=mask,
        generation_config=plainly,
        speculative_mode=drafter,
        speculative_config={"num_draft_tokens": 1},
    )


# ---------------------------------------------------------------- on disk


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
            "base_probe": base_probe(model),
            "prompts": hashlib.sha256(json.dumps(prompts).encode()).hexdigest(),
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
            _write(path, json.dumps(manifest, indent=2).encode())

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
        rows = _say(
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
        _write(path, json.dumps({"prompts": texts, "seconds": time.perf_counter() - began}).encode())

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
        tensors = {name: getattr(whole, name) for name in (*_PER_TOKEN, "lengths")}
        tensors["seconds"] = torch.tensor(time.perf_counter() - began)
        temporary = path.with_suffix(".tmp")
        save_file(tensors, temporary)
        temporary.replace(path)  # a shard is there whole or not at all
        return int(tensors["lengths"].sum())

    def read(self, max_positions: int | None = None) -> Answers:
        """The shards one after the other, until there are so many positions."""
        found: list[tuple[_Shard, dict[str, torch.Tensor]]] = []
        for shard in self.shards():
            if max_positions is not None and sum(len(part["tokens"]) for _, part in found) >= max_positions:
                break
            found.append((shard, load_file(self._path(shard))))
        asking = [self._read_asked(batch)["seconds"] for batch, _ in enumerate(self.batches_to_ask())]
        return Answers(
            **{name: torch.cat([part[name] for _, part in found]) for name in (*_PER_TOKEN, "lengths")},
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


def _write(path: Path, content: bytes) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(content)
    temporary.replace(path)
