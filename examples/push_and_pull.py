"""Push draft heads to the Hub as a PEFT adapter, and load them again by their repository's name.

Needs a token that may write: `hf auth login`, or the environment variable HF_TOKEN.
"""

from __future__ import annotations

import argparse

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

import hf_specdec  # noqa: F401 - PEFT and transformers learn what Medusa heads are


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="the base model: a folder or a Hub id")
    parser.add_argument("--heads", required=True, help="heads that were trained: a folder")
    parser.add_argument("--repo", required=True, metavar="NAME/HEADS", help="where to push them")
    parser.add_argument("--private", action="store_true")
    arguments = parser.parse_args()

    trained = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(arguments.model), arguments.heads)
    commit = trained.push_to_hub(arguments.repo, private=arguments.private)
    print(f"pushed: {commit.commit_url}")

    model = AutoModelForCausalLM.from_pretrained(arguments.model).eval()
    model.load_adapter(arguments.repo, adapter_kwargs={"revision": commit.oid})
    ids = torch.tensor([[1, 5, 6, 7, 5, 6]])
    plain = model.generate(ids, max_new_tokens=16, do_sample=False)
    out = model.generate(ids, max_new_tokens=16, do_sample=False, speculative_mode="medusa")
    print(f"pulled: identical: {'yes' if torch.equal(plain, out) else 'no'}")


if __name__ == "__main__":
    main()
