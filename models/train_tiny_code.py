"""Train the embedded tiny-code pair: a 7 M target on the standard library's sources, a 1 M drafter distilled from it.

Run from the repository root: `python -m models.train_tiny_code`. Under two hours on two CPU cores.
"""

import argparse
import json
import math
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from models.corpus import held_out_prompts, split_modules
from models.model_card import write_model_card

END_OF_TEXT = "<|endoftext|>"
VOCABULARY_SIZE = 4096
CONTEXT_LENGTH = 1024
# Keeps runs of letters, numbers up to three digits, punctuation and indentation apart before merging.
PRE_TOKEN_PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# A system message becomes a comment, everything else is code that the model continues.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}# {{ message['content'] }}\n"
    "{% else %}{{ message['content'] }}{% if not loop.last %}\n{% endif %}{% endif %}"
    "{% endfor %}"
)
console = Console()


@dataclass(frozen=True)
class Recipe:
    """How long and on what each stage trains. Token counts are steps x rows x row length."""

    target_steps: int = 900
    drafter_steps: int = 2400
    generated_rows: int = 1024
    generated_prompt_tokens: int = 64
    generated_row_tokens: int = 256
    rows: int = 8
    row_tokens: int = 512
    long_share: float = 0.2
    seed: int = 7


def model_config(hidden: int, layers: int, heads: int, feed_forward: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        intermediate_size=feed_forward,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=None,
    )


TARGET_CONFIG = model_config(hidden=256, layers=8, heads=8, feed_forward=768)
DRAFTER_CONFIG = model_config(hidden=128, layers=2, heads=4, feed_forward=512)


class TrainingProgress:
    """A progress bar on a terminal, a line now and then in a log file."""

    LOG_EVERY_S = 30.0

    def __init__(self, name: str, steps: int) -> None:
        self._name, self._steps, self._step, self._next_log = name, steps, 0, 0.0
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TimeRemainingColumn(), TextColumn("loss {task.fields[loss]:.3f}"), console=console,
            refresh_per_second=1, disable=not console.is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task(name, total=steps, loss=math.nan)

    def __enter__(self) -> "TrainingProgress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def advance(self, loss: float) -> None:
        """Count one step and show its loss."""
        self._step += 1
        self._bar.update(self._task, advance=1, loss=loss)
        if not console.is_terminal and (time.monotonic() > self._next_log or self._step == self._steps):
            self._next_log = time.monotonic() + self.LOG_EVERY_S
            print(f"{self._name} {self._step}/{self._steps} loss {loss:.3f}", flush=True)


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_TOKEN_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        model_max_length=CONTEXT_LENGTH,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def encode_corpus(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> torch.Tensor:
    """Return all texts as one row of int64 ids, each text preceded by the end-of-text token."""
    ids: list[int] = []
    for text in texts:
        ids.append(0)
        ids.extend(tokenizer.encode(text, add_special_tokens=False))
    ids.append(0)
    return torch.tensor(ids)


def random_batches(
    corpus: torch.Tensor, recipe: Recipe, steps: int, generator: torch.Generator
) -> Iterator[torch.Tensor]:
    """Yield `steps` batches of int64 [rows, row_tokens]; the last share in fewer rows of the full context length."""
    for step in range(steps):
        long_rows = step >= steps * (1 - recipe.long_share)
        tokens = CONTEXT_LENGTH if long_rows else recipe.row_tokens
        rows = recipe.rows * recipe.row_tokens // tokens
        starts = torch.randint(0, len(corpus) - tokens, (rows,), generator=generator)
        yield torch.stack([corpus[start : start + tokens] for start in starts.tolist()])


class Optimizer:
    """Muon for the hidden matrices, AdamW for embeddings and norms, warm-up then linear decay."""

    def __init__(self, model: LlamaForCausalLM, steps: int, muon_rate: float, adam_rate: float) -> None:
        hidden: list[torch.nn.Parameter] = []
        other: list[torch.nn.Parameter] = []
        for name, parameter in model.named_parameters():
            (hidden if parameter.ndim == 2 and "embed" not in name else other).append(parameter)
        self._optimizers = [
            torch.optim.Muon(hidden, lr=muon_rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(other, lr=adam_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
        ]
        self._schedules = [
            torch.optim.lr_scheduler.LambdaLR(
                optimizer, lambda step: min(1.0, (step + 1) / 60) * max(0.0, min(1.0, (steps - step) / (0.7 * steps)))
            )
            for optimizer in self._optimizers
        ]
        self._parameters = list(model.parameters())

    def step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        for optimizer, schedule in zip(self._optimizers, self._schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)


def logits_of(model: LlamaForCausalLM, batch: torch.Tensor) -> torch.Tensor:
    """Return float32 next-token logits [rows * (tokens - 1), vocabulary] computed in bfloat16."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.model(input_ids=batch, use_cache=False).last_hidden_state[:, :-1]
        logits: torch.Tensor = model.lm_head(hidden)
    return logits.flatten(0, 1).float()


def train_target(corpus: torch.Tensor, recipe: Recipe) -> LlamaForCausalLM:
    torch.manual_seed(recipe.seed)
    model = LlamaForCausalLM(TARGET_CONFIG)
    optimizer = Optimizer(model, recipe.target_steps, muon_rate=2e-3, adam_rate=3e-3)
    generator = torch.Generator().manual_seed(recipe.seed)
    with TrainingProgress("target", recipe.target_steps) as progress:
        for batch in random_batches(corpus, recipe, recipe.target_steps, generator):
            loss = F.cross_entropy(logits_of(model, batch), batch[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            progress.advance(loss.item())
    return model.eval()


@torch.inference_mode()
def target_continuations(target: LlamaForCausalLM, corpus: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """Return corpus prompts that the target itself continued: int64 [generated_rows, generated_row_tokens].

    The drafter is judged on the target's own text, so it must have seen some; half greedy, half sampled.
    """
    generator = torch.Generator().manual_seed(recipe.seed + 1)
    torch.manual_seed(recipe.seed + 1)
    prompt_tokens, batch_rows, rows = recipe.generated_prompt_tokens, 64, []
    new_tokens = recipe.generated_row_tokens - prompt_tokens
    with TrainingProgress("samples", recipe.generated_rows // batch_rows) as progress:
        for batch in range(recipe.generated_rows // batch_rows):
            starts = torch.randint(0, len(corpus) - prompt_tokens, (batch_rows,), generator=generator)
            prompts = torch.stack([corpus[start : start + prompt_tokens] for start in starts.tolist()])
            sampling = {"do_sample": True, "temperature": 0.8} if batch % 2 else {"do_sample": False}
            rows.append(
                target.generate(
                    prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=new_tokens,
                    min_new_tokens=new_tokens, pad_token_id=0, **sampling,
                )
            )  # fmt: skip
            progress.advance(math.nan)
    return torch.cat(rows)


def row_batches(rows: torch.Tensor, recipe: Recipe, steps: int, generator: torch.Generator) -> Iterator[torch.Tensor]:
    """Yield `steps` random selections of whole rows with the token count of a corpus batch."""
    count = recipe.rows * recipe.row_tokens // rows.shape[1]
    for _ in range(steps):
        yield rows[torch.randint(0, len(rows), (count,), generator=generator)]


def distil_drafter(
    target: LlamaForCausalLM, corpus: torch.Tensor, generated: torch.Tensor, recipe: Recipe
) -> LlamaForCausalLM:
    """Train the drafter on the target's whole distribution (forward KL) and on its favourite token."""
    torch.manual_seed(recipe.seed + 2)
    drafter = LlamaForCausalLM(DRAFTER_CONFIG)
    optimizer = Optimizer(drafter, recipe.drafter_steps, muon_rate=3e-3, adam_rate=5e-3)
    generator = torch.Generator().manual_seed(recipe.seed + 2)
    sources = [
        random_batches(corpus, recipe, recipe.drafter_steps, generator),
        row_batches(generated, recipe, recipe.drafter_steps, generator),
    ]
    with TrainingProgress("drafter", recipe.drafter_steps) as progress:
        for step in range(recipe.drafter_steps):
            batch = next(sources[step % 2])
            with torch.inference_mode():
                teacher = logits_of(target, batch)
                teacher_probabilities, favourite = teacher.softmax(-1), teacher.argmax(-1)
            log_q = logits_of(drafter, batch).log_softmax(-1)
            cross_entropy = -(teacher_probabilities.clone() * log_q).sum(-1).mean()
            loss = cross_entropy + 0.5 * F.nll_loss(log_q, favourite.clone())
            loss.backward()
            optimizer.step()
            progress.advance(loss.item())
    return drafter.eval()


@torch.inference_mode()
def perplexity(model: LlamaForCausalLM, corpus: torch.Tensor) -> float:
    """Return exp(mean negative log-likelihood) over disjoint windows of the full context length."""
    windows = corpus[: len(corpus) // CONTEXT_LENGTH * CONTEXT_LENGTH].view(-1, CONTEXT_LENGTH)
    losses = []
    for window in windows.split(4):
        logits = model(input_ids=window, use_cache=False).logits[:, :-1].flatten(0, 1).float()
        losses.append(F.cross_entropy(logits, window[:, 1:].flatten(), reduction="none"))
    return math.exp(torch.cat(losses).mean().item())


@torch.inference_mode()
def greedy_accepted_length(
    target: LlamaForCausalLM,
    drafter: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    draft_length: int,
    prompts: int,
) -> float:
    """Return committed tokens per verification on held-out prompts at temperature 0.

    A chain is accepted up to its first mismatch, so the matches of the drafter's argmax along the target's own
    greedy text tell every round's outcome without running rounds.
    """
    committed = rounds = 0
    for prompt in held_out_prompts(prompts):
        ids = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False)])
        text = target.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=96, do_sample=False, pad_token_id=0
        )
        matches = (
            drafter(input_ids=text).logits[0, ids.shape[1] - 1 : -1].argmax(-1) == text[0, ids.shape[1] :]
        ).tolist()
        position = 0
        while position < len(matches):
            accepted = 0
            while accepted < draft_length and position + accepted < len(matches) - 1 and matches[position + accepted]:
                accepted += 1
            committed += accepted + 1
            rounds += 1
            position += accepted + 1
    return committed / rounds


def save_model(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> LlamaForCausalLM:
    """Save as bfloat16 and return the model as a user will load it, in float32."""
    folder.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return load(folder)


def evaluate(
    target: LlamaForCausalLM, drafter: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, recipe: Recipe
) -> dict[str, Any]:
    """Return the figures of a trained pair on modules that it has not seen, and what it was trained on."""
    training, held_out = split_modules()
    evaluation = encode_corpus(tokenizer, [module.text for module in held_out])
    return {
        "python": platform.python_version(),
        "training_modules": len(training),
        "training_tokens": len(encode_corpus(tokenizer, [module.text for module in training])),
        "held_out_modules": [module.name for module in held_out],
        "target_steps": recipe.target_steps,
        "drafter_steps": recipe.drafter_steps,
        "tokens_per_step": recipe.rows * recipe.row_tokens,
        "target_perplexity": round(perplexity(target, evaluation), 2),
        "drafter_perplexity": round(perplexity(drafter, evaluation), 2),
        "greedy_accepted_length_k4": round(greedy_accepted_length(target, drafter, tokenizer, 4, prompts=100), 2),
    }


def parameters_of(model: LlamaForCausalLM) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def load(folder: Path) -> LlamaForCausalLM:
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "tiny-code")
    parser.add_argument("--target-steps", type=int, default=Recipe.target_steps)
    parser.add_argument("--drafter-steps", type=int, default=Recipe.drafter_steps)
    parser.add_argument("--keep-target", action="store_true", help="train a drafter for the target in OUTPUT")
    parser.add_argument("--keep-both", action="store_true", help="train nothing: evaluate the pair in OUTPUT again")
    options = parser.parse_args()
    recipe = Recipe(target_steps=options.target_steps, drafter_steps=options.drafter_steps)

    began = time.monotonic()
    training = [module.text for module in split_modules()[0]]
    if options.keep_target or options.keep_both:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(options.output / "target")
        target = load(options.output / "target")
    else:
        tokenizer = train_tokenizer(training)
        target = train_target(encode_corpus(tokenizer, training), recipe)
        target = save_model(target, tokenizer, options.output / "target")
    if options.keep_both:
        drafter = load(options.output / "draft")
    else:
        corpus = encode_corpus(tokenizer, training)
        generated = target_continuations(target, corpus, recipe)
        drafter = save_model(distil_drafter(target, corpus, generated, recipe), tokenizer, options.output / "draft")

    facts = evaluate(target, drafter, tokenizer, recipe)
    (options.output / "training.json").write_text(json.dumps(facts, indent=2) + "\n")
    for role, model in (("target", target), ("draft", drafter)):
        write_model_card(options.output / role, role, parameters_of(model), facts)
    console.print(facts)
    console.print(f"done in {(time.monotonic() - began) / 60:.0f} minutes")


if __name__ == "__main__":
    main()
