"""Generate plainly and speculatively, greedily and sampling, and compare."""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_specdec  # noqa: F401 - model.generate() gains speculative_mode=
from hf_specdec.measure.smollm2 import smollm2_folder

PROMPT = "Repeat this line three times: the quick brown fox jumps over the lazy dog."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a folder or a Hub id (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    arguments = parser.parse_args()

    source = arguments.model or str(smollm2_folder())
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()

    text, is_chat = arguments.prompt, bool(tokenizer.chat_template)
    if is_chat:
        messages = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    # the template has already written the special tokens
    inputs = tokenizer(text, return_tensors="pt", add_special_tokens=not is_chat, return_token_type_ids=False)

    for name, settings in {
        "greedy": {"do_sample": False},
        "sampled": {"do_sample": True, "temperature": 0.7, "top_p": 0.95},
    }.items():
        settings["max_new_tokens"] = arguments.max_new_tokens
        torch.manual_seed(0)
        plain = model.generate(**inputs, **settings)
        torch.manual_seed(0)
        out = model.generate(**inputs, **settings, speculative_mode="prompt_lookup", return_dict_in_generate=True)
        print(tokenizer.decode(out.sequences[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
        print(
            f"{name}: identical: {'yes' if torch.equal(plain, out.sequences) else 'no'}, "
            f"mean acceptance length: {out.speculation.mean_acceptance_length:.2f}"
        )


if __name__ == "__main__":
    main()
