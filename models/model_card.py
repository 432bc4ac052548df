"""Model cards of the tiny-code pair, written from the figures of the run that trained it."""

from pathlib import Path
from typing import Any

CARD = """\
---
license: psf-2.0
language: [code]
pipeline_tag: text-generation
---

# tiny-code {role}

{purpose} {parameters:,} parameters, Llama architecture, byte-level BPE tokenizer of 4,096 tokens shared by the
pair, context of 1,024 tokens, weights stored in bfloat16. It completes Python code plausibly at this size; it is
meant for trying, testing and measuring Leadout without a GPU, not for writing software.

| | |
|---|---|
| data | the standard library of CPython {python}, {training_modules} modules, {training_tokens:,} tokens |
| held out | {held_out_count} whole modules, listed in `../training.json` |
| steps | {steps} of {tokens_per_step:,} tokens |
| held-out perplexity | {perplexity} |
| accepted length with draft length 4, greedy, held-out prompts | {accepted_length} |
| reproduce | `python -m models.train_tiny_code` |

## Licence

Trained on the Python standard library, © Python Software Foundation, used under the PSF License Version 2;
its text is in `../PSF-LICENSE.txt`. The weights are offered under the same licence.

## Chat template

System messages become a comment, user and assistant messages are code that the model continues.
"""
PURPOSES = {
    "target": "A small code model trained on the Python standard library's sources.",
    "draft": "The drafter of the pair, distilled from the target on corpus text and on the target's own continuations.",
}


def write_model_card(folder: Path, role: str, parameters: int, facts: dict[str, Any]) -> None:
    """Write `folder`/README.md for `role` ("target" or "draft")."""
    steps_key, perplexity_key = {
        "target": ("target_steps", "target_perplexity"),
        "draft": ("drafter_steps", "drafter_perplexity"),
    }[role]
    card = CARD.format(
        role=role,
        purpose=PURPOSES[role],
        parameters=parameters,
        held_out_count=len(facts["held_out_modules"]),
        steps=facts[steps_key],
        perplexity=facts[perplexity_key],
        accepted_length=facts["greedy_accepted_length_k4"],
        **{key: facts[key] for key in ("python", "training_modules", "training_tokens", "tokens_per_step")},
    )
    (folder / "README.md").write_text(card, encoding="utf-8")
