"""Speculate in a text-generation pipeline, in batches, and compare with the plain pipeline."""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

import hf_specdec
from hf_specdec.measure.smollm2 import smollm2_folder

PROMPTS = [
    "one two three four five, one two three four five, one two",
    "The capital of France is",
    "def add(a, b): return a + b  def sub(a, b): return",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a folder or a Hub id (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--batch-size", type=int, default=3)
    arguments = parser.parse_args()

    source = arguments.model or str(smollm2_folder())
    tokenizer = AutoTokenizer.from_pretrained(source, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer, batch_size=arguments.batch_size)

    settings = {"max_new_tokens": arguments.max_new_tokens, "do_sample": False, "return_full_text": False}
    plain = pipe(PROMPTS, **settings)
    with hf_specdec.record() as stats:  # a pipeline returns texts, so the statistics are collected beside it
        texts = pipe(PROMPTS, **settings, speculative_mode="prompt_lookup")

    for prompt, row, (answer,) in zip(PROMPTS, stats.rows, texts, strict=True):
        print(f"{prompt!r} -> {answer['generated_text']!r}")
        print(f"  {row.tokens} tokens in {row.rounds} rounds")
    print(
        f"pipeline: identical: {'yes' if texts == plain else 'no'}, "
        f"mean acceptance length: {stats.mean_acceptance_length:.2f}"
    )


if __name__ == "__main__":
    main()
