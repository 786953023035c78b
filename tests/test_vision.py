"""Vision-language models against plain generate, tiny and random: images in the prompt, drafts in the text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from conftest import assert_same, noisy_trees, prompt, texts_of

import hf_specdec
from hf_specdec.errors import UnsupportedGenerationError, UnsupportedModelError
from hf_specdec.host.generate import CACHE_KEY
from hf_specdec.target.selftest import support
from hf_specdec.testing import ScriptedDrafter

VOCABULARY, IMAGE, PER_IMAGE = 97, 90, 4
_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
    "projection_dim": 32,
}
_GRID: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "out_hidden_size": 32,
    "num_heads": 4,
    "intermediate_size": 48,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 16,
}
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
_MARKS = {"image_token_id": IMAGE, "video_token_id": 91, "vision_start_token_id": 93, "vision_end_token_id": 94}
_HYBRID = {
    "num_hidden_layers": 4,
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    "rope_parameters": {**_MROPE, "partial_rotary_factor": 1.0},
}
t = transformers
CONFIGS: dict[str, Any] = {
    "llava": lambda: t.LlavaConfig(
        text_config=t.LlamaConfig(**_TEXT), vision_config=t.CLIPVisionConfig(**_VISION), image_token_index=IMAGE
    ),
    # positions of three dimensions
    "qwen2_vl": lambda: t.Qwen2VLConfig(
        text_config={**_TEXT, "rope_parameters": _MROPE},
        vision_config={"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2, "patch_size": 4},
        **_MARKS,
    ),
    # features of several layers of the vision tower go into the prompt's forward
    "qwen3_vl": lambda: t.Qwen3VLConfig(
        text_config={**_TEXT, "rope_parameters": _MROPE},
        vision_config={**_GRID, "deepstack_visual_indexes": [0]},
        **_MARKS,
    ),
    # recurrent states
    "qwen3_5": lambda: t.Qwen3_5Config(text_config={**_TEXT, **_HYBRID}, vision_config=_GRID, **_MARKS),
    # sliding windows; image tokens see one another; their token has no embedding
    "gemma3": lambda: t.Gemma3Config(
        text_config=t.Gemma3TextConfig(
            **_TEXT, sliding_window=8, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
        ),
        vision_config=t.SiglipVisionConfig(**_VISION),
        image_token_index=VOCABULARY + 3,
        mm_tokens_per_image=PER_IMAGE,
        boi_token_index=91,
        eoi_token_index=92,
    ),
    # types of tokens change between prompt and text
    "paligemma": lambda: t.PaliGemmaConfig(
        text_config=t.GemmaConfig(**_TEXT),
        vision_config=t.SiglipVisionConfig(**_VISION),
        image_token_index=IMAGE,
        projection_dim=32,
        hidden_size=32,
    ),
    # keeps images in the cache that have no token in the prompt
    "git": lambda: t.GitConfig(
        **{name: value for name, value in _TEXT.items() if name not in ("head_dim", "num_key_value_heads")},
        vision_config=_VISION,
    ),
    # images are read by cross attention
    "mllama": lambda: t.MllamaConfig(
        text_config={
            **{name: value for name, value in _TEXT.items() if name != "head_dim"},
            "cross_attention_layers": [1],
        },
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_global_layers": 1,
            "attention_heads": 4,
            "image_size": 16,
            "patch_size": 8,
            "vision_output_dim": 64,
            "intermediate_layers_indices": [0],
            "max_num_tiles": 1,
            "supported_aspect_ratios": [[1, 1]],
        },
        image_token_index=IMAGE,
    ),
}
# GIT of transformers 5.17 takes no text without an image, so the self-test refuses it
FROM_5_24 = tuple(name for name in ("git",) if CACHE_KEY == "cache")
BATCHED = ("llava", "qwen2_vl", "qwen3_vl", "qwen3_5", "gemma3", "paligemma")


def build(name: str) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = t.AutoModelForImageTextToText.from_config(CONFIGS[name]()).eval()
        for weight in model.parameters():
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, std=0.2)
    model.generation_config = t.GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    return model


def inputs(model: Any, batch: int, seed: int = 5) -> dict[str, torch.Tensor]:
    """Prompts with an image each, one of them padded, and their images."""
    kind, images = model.config.model_type, torch.Generator().manual_seed(seed)
    ids = torch.randint(5, 88, (batch, 18), generator=torch.Generator().manual_seed(1))
    ids[:, -5:] = ids[:, -10:-5]
    ids[:, 2] = 93
    token = getattr(model.config, "image_token_id", None)
    if token is not None:
        ids[:, 3 : 3 + PER_IMAGE] = token
    ids[:, -1] = ids[:, 2]  # the image's first token followed it
    given = {"attention_mask": torch.ones_like(ids)}
    if batch > 1:
        ids[1] = torch.cat([torch.zeros(2, dtype=torch.long), ids[1, :-2]])
        given["attention_mask"][1, :2] = 0
    if kind.startswith("qwen"):
        pixels = torch.randn(batch * 4 * PER_IMAGE, 3 * 2 * 4 * 4, generator=images)
        given |= {"image_grid_thw": torch.tensor([[1, 4, 4]] * batch), "mm_token_type_ids": (ids == token).long()}
    else:
        pixels = torch.randn(batch, 3, 16, 16, generator=images)
    if kind == "gemma3":
        given["token_type_ids"] = (ids == token).long()
    if kind == "paligemma":
        given["token_type_ids"] = torch.zeros_like(ids)
    if kind == "mllama":
        ones = torch.ones(batch, 1, dtype=torch.long)
        pixels = pixels[:, None, None]
        given |= {"aspect_ratio_ids": ones, "aspect_ratio_mask": ones[:, None]}
        given["cross_attention_mask"] = torch.ones(batch, ids.shape[1], 1, 1, dtype=torch.long)
    return {"input_ids": ids, "pixel_values": pixels, **given}


@pytest.fixture(scope="module", params=[*BATCHED, *FROM_5_24])
def model(request: pytest.FixtureRequest) -> Any:
    return build(request.param)


def batches(model: Any) -> tuple[int, ...]:
    return (1, 3) if model.config.model_type in BATCHED else (1,)


@pytest.mark.parametrize("mode", ["prompt_lookup", "lookahead", "early_exit"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_same_text(model: Any, mode: str, do_sample: bool) -> None:
    asked = {"speculative_mode": mode, "speculative_config": {"num_draft_tokens": 4}}
    sampling = {"temperature": 0.9} if do_sample else {}
    for batch in batches(model):
        assert_same(model, inputs(model, batch), asked, max_new_tokens=16, do_sample=do_sample, **sampling)


def test_drafts_are_accepted_and_rejected(model: Any) -> None:
    decoding = {"max_new_tokens": 21, "eos_token_id": None}
    for batch in batches(model):
        given = inputs(model, batch)
        texts, rounds = texts_of(model, given, **decoding), []
        assert texts != texts_of(model, inputs(model, batch, seed=6), **decoding)  # the images matter
        for drafter in (ScriptedDrafter.knowing(texts, 4), noisy_trees(texts)):
            asked = {"speculative_mode": drafter, "speculative_config": {"num_draft_tokens": 4}}
            rounds.append(assert_same(model, given, asked, **decoding).rounds)
        assert rounds[0] == 4  # twenty tokens after the prompts', five in a round
        assert 4 < rounds[1] < 20


@pytest.mark.parametrize("name", ["qwen2_vl", "gemma3"])
def test_a_returned_cache_is_continued(name: str) -> None:
    model = build(name)
    given = inputs(model, 1)
    texts = []
    for asked in ({}, {"speculative_mode": "prompt_lookup"}):
        first = model.generate(**given, **asked, max_new_tokens=9, eos_token_id=None, return_dict_in_generate=True)
        longer = torch.cat([first.sequences, torch.tensor([[7, 8, 9]])], dim=1)
        cache = {CACHE_KEY: first[CACHE_KEY]}
        types = {
            key: torch.nn.functional.pad(given[key], (0, longer.shape[1] - given[key].shape[1]))
            for key in ("mm_token_type_ids", "token_type_ids")
            if key in given
        }
        second = model.generate(longer, **cache, **types, **asked, max_new_tokens=9, eos_token_id=None)
        texts.append(second.tolist())
    assert texts[0] == texts[1]


def test_several_texts_to_an_image() -> None:
    model = build("qwen2_vl")
    asked = {"speculative_mode": "prompt_lookup", "speculative_config": {"num_draft_tokens": 4}}
    assert_same(model, inputs(model, 1), asked, max_new_tokens=12, do_sample=True, num_return_sequences=3)


def test_images_read_by_cross_attention_are_refused_before_the_prompt_is_read() -> None:
    model = build("mllama")
    given, calls = inputs(model, 1), []
    support(model)
    with hf_specdec.record() as stats:
        handle = model.register_forward_pre_hook(lambda *_: calls.append(1))
        with pytest.raises(UnsupportedGenerationError, match="'cross_attention_mask'"):
            model.generate(**given, max_new_tokens=4, speculative_mode="prompt_lookup")
        handle.remove()
    assert stats.calls == 0
    plain = model.generate(**given, max_new_tokens=4)
    with pytest.warns(UserWarning, match="Decoding plainly"):
        ours = model.generate(
            **given,
            max_new_tokens=4,
            speculative_mode="prompt_lookup",
            speculative_config={"on_unsupported": "plain"},
        )
    assert ours.tolist() == plain.tolist()


@pytest.mark.parametrize("name", FROM_5_24)
def test_padding_that_single_steps_do_not_see_is_refused(name: str) -> None:
    model = build(name)
    with pytest.raises(UnsupportedModelError, match="padded prompts"):
        model.generate(**inputs(model, 3), max_new_tokens=4, speculative_mode="prompt_lookup")


class WithMemory(t.LlamaForCausalLM):
    """Puts two entries of its own before every prompt, and tells no mask of them."""

    def forward(self, input_ids: Any = None, inputs_embeds: Any = None, attention_mask: Any = None, **kwargs: Any):
        cache = kwargs[CACHE_KEY]
        if cache.get_seq_length() == 0 and input_ids.shape[1] > 4:
            memory = torch.ones(input_ids.shape[0], 2, self.config.hidden_size)
            inputs_embeds = torch.cat([memory, self.get_input_embeddings()(input_ids)], dim=1)
            return super().forward(inputs_embeds=inputs_embeds, **{**kwargs, "position_ids": None})
        return super().forward(input_ids=input_ids, **kwargs)


def test_more_in_the_cache_than_the_mask_tells_of_is_refused() -> None:
    model = WithMemory(t.LlamaConfig(**_TEXT)).eval()
    with pytest.raises(UnsupportedModelError, match="keeps 14 tokens of prompts with an attention_mask for 12"):
        model.generate(**prompt(2, padding=3), max_new_tokens=4, pad_token_id=0, speculative_mode="prompt_lookup")


def processor() -> Any:
    """A processor whose tokenizer has a word for each token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    words = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(3, VOCABULARY))]
    words[IMAGE] = "<image>"
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = t.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        extra_special_tokens={"image_token": "<image>"},
        padding_side="left",
    )
    square = {"height": 16, "width": 16}
    return t.LlavaProcessor(
        CLIPImageProcessorPil(size=square, crop_size=square),
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template="{% for message in messages %}{% for part in message['content'] %}"
        "{{ '<image>' if part['type'] == 'image' else part['text'] }} {% endfor %}{% endfor %}",
    )


def test_pipeline() -> None:
    from PIL import Image

    pixels = torch.randint(0, 255, (2, 20, 30, 3), generator=torch.Generator().manual_seed(2), dtype=torch.uint8)
    pipe = t.pipeline("image-text-to-text", model=build("llava"), processor=processor())
    chats = [
        [{"role": "user", "content": [{"type": "image", "image": Image.fromarray(image.numpy())}, *text]}]
        for image, text in zip(
            pixels, ([{"type": "text", "text": "w5 w6 w7 w8 w5 w6"}], [{"type": "text", "text": "w9"}]), strict=True
        )
    ]
    for batch_size in (1, 2):
        plain = pipe(text=chats, batch_size=batch_size, generate_kwargs={"max_new_tokens": 40})
        asked = {"speculative_mode": "prompt_lookup", "speculative_config": {"num_draft_tokens": 4}}
        with hf_specdec.record() as stats:
            ours = pipe(text=chats, batch_size=batch_size, generate_kwargs={"max_new_tokens": 40, **asked})
        assert ours == plain
        assert stats.total.accepted > 0
