"""Train Medusa heads for a model on its own answers, load them, and compare with plain decoding."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_specdec  # noqa: F401 - model.generate() gains speculative_mode=
from hf_specdec.heads import MedusaConfig
from hf_specdec.measure.smollm2 import smollm2_folder
from hf_specdec.training import DataSettings, TrainingSettings, train_heads

# a handful, so that the example takes minutes; heads that are of use want thousands
PROMPTS = [
    "Name three colours.",
    "Why is the sky blue?",
    "Write a line about the sea.",
    "What is two plus three?",
    "Explain what a noun is.",
    "Give me a name for a cat.",
    "How do I boil an egg?",
    "What do bees make?",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a folder or a Hub id (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--output", type=Path, help="where to save the heads (default: a folder that is removed)")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    arguments = parser.parse_args()

    source = arguments.model or str(smollm2_folder())
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        data, output = folder / "prompts.jsonl", arguments.output or folder / "heads"
        data.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS), encoding="utf-8")
        report = train_heads(
            model,
            tokenizer,
            [data],
            output,
            MedusaConfig(num_heads=3, head_type="sequential"),
            data_settings=DataSettings(max_new_tokens=arguments.max_new_tokens, batch_size=4),
            settings=TrainingSettings(epochs=4, batch_size=32, eval_part=0.3),
        )
        for number, head in enumerate(report.heads, start=1):
            print(f"head {number}: top-1 {head['top1']:.2f} on held-out prompts")
        model.load_adapter(str(output))

    text, is_chat = PROMPTS[0], bool(tokenizer.chat_template)
    if is_chat:
        messages = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    inputs = tokenizer(text, return_tensors="pt", add_special_tokens=not is_chat, return_token_type_ids=False)
    settings = {"do_sample": False, "max_new_tokens": arguments.max_new_tokens}
    plain = model.generate(**inputs, **settings)
    out = model.generate(**inputs, **settings, speculative_mode="medusa", return_dict_in_generate=True)
    print(
        f"medusa: identical: {'yes' if torch.equal(plain, out.sequences) else 'no'}, "
        f"mean acceptance length: {out.speculation.mean_acceptance_length:.2f}"
    )


if __name__ == "__main__":
    main()
