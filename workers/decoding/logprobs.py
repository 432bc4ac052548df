"""Log-probabilities of tokens, as the model itself gives them: before rules, temperature and filters."""

from collections.abc import Sequence

import numpy as np
import torch

from workers.messages import TokenIds, TokenLogprobs


@torch.inference_mode()
def token_logprobs(logits: torch.Tensor, tokens: TokenIds, top: int) -> TokenLogprobs:
    """Return the report on `tokens` int32 [t], each at its row of `logits` float32 [t, V].

    `top` (0 to V) of the likeliest tokens come with each. A row that is not finite gives NaN.
    """
    normalisers = logits.logsumexp(dim=-1, keepdim=True)
    chosen = torch.from_numpy(tokens.astype(np.int64)).to(logits.device).unsqueeze(-1)
    best, ids = logits.topk(min(top, logits.shape[-1]), dim=-1)
    return TokenLogprobs(
        chosen=(logits.gather(-1, chosen) - normalisers).squeeze(-1).cpu().numpy(),
        top_ids=ids.cpu().numpy().astype(np.int32),
        top=(best - normalisers).cpu().numpy(),
    )


def split_logprobs(logprobs: TokenLogprobs, counts: Sequence[int], tops: Sequence[int]) -> list[TokenLogprobs]:
    """Cut a report on several runs of tokens, `counts` long, into one per run with `tops` likeliest tokens each."""
    ends = np.cumsum(counts).tolist()
    return [
        TokenLogprobs(part.chosen, part.top_ids[:, :top], part.top[:, :top])
        for part, top in (
            (logprobs[end - count : end], top) for end, count, top in zip(ends, counts, tops, strict=True)
        )
    ]
