"""Warping: from logits to the scores of the distribution that a request asked for.

Order and meaning are those of transformers and vLLM: temperature, then top-k, then top-p on what top-k left. Both
filters keep every token that ties with the last one kept, so the result depends on the logits alone and not on
how a sort orders equal values.
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


def filter_scores(scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return `scores` with -inf where top-k or top-p removes a token.

    `scores` float32 [rows, V]; `top_k` int64 [rows], 0 for off; `top_p` float32 [rows], 1 for off. At least one token
    per row remains.
    """
    vocabulary = scores.shape[-1]
    kept = torch.where((top_k > 0) & (top_k < vocabulary), top_k, vocabulary)
    cuts_mass = bool((top_p < 1).any())
    widest = vocabulary if cuts_mass and bool((kept == vocabulary).any()) else int(kept.max())
    ordered = scores.topk(widest, dim=-1).values
    threshold = ordered.gather(-1, (kept.clamp(max=widest) - 1).unsqueeze(-1))
    if cuts_mass:
        ordered = ordered.masked_fill(ordered < threshold, -torch.inf)
        # Sums from left to right, unlike a softmax, do not depend on how wide the other rows make this one.
        weights = (ordered - ordered[..., :1]).exp()
        mass = weights.cumsum(dim=-1)
        inside = (mass - weights < top_p.unsqueeze(-1) * mass[..., -1:]) | (top_p >= 1).unsqueeze(-1)
        last = inside.sum(dim=-1, keepdim=True).clamp(min=1) - 1
        threshold = torch.maximum(threshold, ordered.gather(-1, last))
    return scores.masked_fill(scores < threshold, -torch.inf)
