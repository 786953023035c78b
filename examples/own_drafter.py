"""A drafter of one's own, registered as a mode."""

from __future__ import annotations

import argparse
from itertools import pairwise

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specdec import Budget, Context, Draft, Drafter, Mode, SpeculativeConfig, register_mode
from hf_specdec.measure.smollm2 import smollm2_folder

PROMPT = "red green blue red green blue red green"


class BigramDrafter(Drafter):
    """After every token, what followed it last time."""

    def propose(self, context: Context, budget: Budget) -> Draft:
        chains: list[list[int]] = []
        for text, depth in zip(context.tokens, budget.depth, strict=True):
            following = dict(pairwise(text))
            chain, token = [], text[-1]
            while len(chain) < depth and token in following:
                token = following[token]
                chain.append(token)
            chains.append(chain)
        # how often this is right, the controller finds out: all drafted tokens are equally likely to us
        return Draft.chains(context.roots, chains, confidence=[[0.5] * len(chain) for chain in chains])


register_mode(Mode("bigram", SpeculativeConfig, lambda request, config: BigramDrafter()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a folder or a Hub id (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    arguments = parser.parse_args()

    source = arguments.model or str(smollm2_folder())
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    inputs = tokenizer(arguments.prompt, return_tensors="pt", return_token_type_ids=False)

    settings = {"max_new_tokens": arguments.max_new_tokens, "do_sample": False}
    plain = model.generate(**inputs, **settings)
    out = model.generate(**inputs, **settings, speculative_mode="bigram", return_dict_in_generate=True)
    print(tokenizer.decode(out.sequences[0], skip_special_tokens=True))
    print(
        f"bigram: identical: {'yes' if torch.equal(plain, out.sequences) else 'no'}, "
        f"mean acceptance length: {out.speculation.mean_acceptance_length:.2f}"
    )


if __name__ == "__main__":
    main()
