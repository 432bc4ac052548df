"""Warping: from logits to the scores of the distribution that a request asked for.

Order and meaning are those of vLLM (V1, vllm/v1/sample/sampler.py, `Sampler.sample`): temperature, then min-p, then
top-k, then top-p on what the other two left. transformers has min-p last, so that its top-p counts the tokens that
min-p removes; the rest is the same there. All filters keep every token that ties with the last one kept, so the
result depends on the logits alone and not on how a sort orders equal values.
"""

import torch


def temperature_scores(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Return log-probabilities up to a constant per row, float32 [rows, V], the largest being 0.

    `logits` float32 [rows, V]; `temperature` float32 [rows], above 0. Subtracting the maximum first keeps the
    smallest temperatures free of overflow.
    """
    shifted = logits - logits.max(dim=-1, keepdim=True).values
    # In float32 the smallest temperatures round to 0, and 0 / 0 would make the favourite NaN.
    return shifted.div_(temperature.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(-1))


def drop_improbable_(scores: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Set scores to -inf, in place, of tokens less probable than `min_p` times the most probable one; return them.

    `scores` float32 [rows, V], the largest of each row being 0; `min_p` float32 [rows], 0 to 1, 0 for off. The most
    probable token remains (Nguyen et al. 2024, "Min-p sampling", section 3).
    """
    rows = (min_p > 0).nonzero(as_tuple=True)[0]
    if len(rows):
        chosen = scores[rows]
        scores[rows] = chosen.masked_fill_(chosen < min_p[rows].log().unsqueeze(-1), -torch.inf)
    return scores


# Most rows keep few tokens: look at this many of the largest first, then at eight times as many, and so on.
_FIRST_WIDTH = 128
_WIDENING = 8


def filter_scores(scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return `scores` with -inf where top-k or top-p removes a token.

    `scores` float32 [rows, V], the largest of each row being 0, min-p having been there already; `top_k` int64 [rows],
    0 for off; `top_p` float32 [rows], 1 for off. At least one token per row remains. A row's result does not depend on
    the other rows.
    """
    vocabulary = scores.shape[-1]
    kept = torch.where((top_k > 0) & (top_k < vocabulary), top_k, vocabulary)
    thresholds = torch.full_like(top_p, -torch.inf)
    pending = ((kept < vocabulary) | (top_p < 1)).nonzero(as_tuple=True)[0]
    width = _FIRST_WIDTH
    while len(pending):
        width = min(width, vocabulary)
        found, settled = _thresholds(scores[pending], kept[pending], top_p[pending], width)
        thresholds[pending[settled]] = found[settled]
        pending = pending[~settled]
        width *= _WIDENING
    return scores.masked_fill(scores < thresholds.unsqueeze(-1), -torch.inf)


def _thresholds(
    scores: torch.Tensor, kept: torch.Tensor, top_p: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's smallest kept score, and whether `width` of the largest scores were enough to tell.

    `scores` [rows, V], `kept` int64 [rows] (V where top-k is off), `top_p` [rows].
    """
    vocabulary = scores.shape[-1]
    ordered = scores.topk(width, dim=-1).values
    # Sums from left to right, unlike a softmax, do not depend on the width.
    weights = ordered.exp()
    mass = weights.cumsum(dim=-1)
    last_of_top_k = kept.clamp(max=width).unsqueeze(-1) - 1
    total = torch.where(kept.unsqueeze(-1) < vocabulary, mass.gather(-1, last_of_top_k), _row_sums(scores.exp()))
    inside = (mass - weights < top_p.unsqueeze(-1) * total) | (top_p >= 1).unsqueeze(-1)
    last_of_top_p = inside.sum(dim=-1, keepdim=True).clamp(min=1) - 1
    last = torch.minimum(last_of_top_k, last_of_top_p).squeeze(-1)
    # Top-k must fit, for the mass that it leaves; without top-k, the cut of top-p must lie inside what was looked at.
    settled = (kept <= width) | ((kept == vocabulary) & (last < width - 1))
    return ordered.gather(-1, last.unsqueeze(-1)).squeeze(-1), settled


def _row_sums(values: torch.Tensor) -> torch.Tensor:
    """Return [rows, 1]. From left to right: torch's own sum adds in another order when there are more rows."""
    return values.cumsum(dim=-1, dtype=torch.float64)[..., -1:].to(values.dtype)
