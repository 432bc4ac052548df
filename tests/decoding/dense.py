"""The filters on whole rows of scores, as their definitions are written."""

import torch

from workers.decoding.scores import ChunkedLogits, ChunkedScores
from workers.decoding.warping import cutoffs


def filter_scores(
    scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor | None = None
) -> torch.Tensor:
    """`scores` [rows, V] with -inf where a filter removes a token; the largest of each row is 0."""
    rows = torch.arange(len(scores))
    chunked = ChunkedScores.of(ChunkedLogits.of(scores), rows, torch.ones_like(top_p))
    kept = cutoffs(chunked, torch.zeros_like(top_p) if min_p is None else min_p, top_k, top_p)
    return scores.masked_fill(chunked.dense(rows) < kept.unsqueeze(-1), -torch.inf)
