"""Warping: from logits to the scores of the distribution that a request asked for.

Order and meaning are those of vLLM (V1, vllm/v1/sample/sampler.py, `Sampler.sample`): temperature, then min-p, then
top-k, then top-p on what the other two left. transformers has min-p last, so that its top-p counts the tokens that
min-p removes; the rest is the same there. All filters keep every token that ties with the last one kept, so the
result depends on the logits alone and not on how a sort orders equal values.
"""

from dataclasses import dataclass

import torch

from workers.decoding.noise import block_numbers
from workers.decoding.scores import ChunkedScores, descending, usable_temperature


def temperature_scores(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Return log-probabilities up to a constant per row, float32 [rows, V], the largest being 0.

    `logits` float32 [rows, V]; `temperature` float32 [rows], above 0. Subtracting the maximum first keeps the
    smallest temperatures free of overflow.
    """
    shifted = logits - logits.max(dim=-1, keepdim=True).values
    return shifted.div_(usable_temperature(temperature).unsqueeze(-1))


# Most rows keep few tokens: look at this many of the largest first, then at eight times as many, and so on.
_FIRST_WIDTH = 128
_WIDENING = 8
# Sums in float32 are this close to the truth, with room to spare.
_MASS_SLACK = 1e-5


def cutoffs(scores: ChunkedScores, min_p: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return float32 [rows]: the smallest score that min-p, top-k and top-p together leave, at most 0, -inf for any.

    All three keep the scores from some value on. `min_p` float32 [rows], 0 to 1, 0 for off, removes tokens less
    probable than `min_p` times the most probable one (Nguyen et al. 2024, "Min-p sampling", section 3). `top_k` int64
    [rows] is 0 for off, `top_p` float32 [rows] 1 for off. A row's cutoff does not depend on the other rows.
    """
    vocabulary = scores.source.vocabulary
    kept = torch.where((top_k > 0) & (top_k < vocabulary), top_k, vocabulary)
    found = min_p.log()
    pending = ((kept < vocabulary) | (top_p < 1)).nonzero(as_tuple=True)[0]
    if not len(pending):
        return found
    filters = _Filters(scores, found.clone(), kept, top_p)
    pending = filters.narrow_(found, pending, _FIRST_WIDTH, masses=None)
    masses = _masses(scores, filters.least, pending[kept[pending] == vocabulary])
    width = _FIRST_WIDTH
    while len(pending):
        pending = filters.narrow_(found, pending, width, masses)
        width *= _WIDENING
    return found


@dataclass(frozen=True, slots=True)
class _Filters:
    """Top-k and top-p of the rows of `scores`, on what is at least `least` float32 [rows].

    `kept` int64 [rows] is V where top-k is off.
    """

    scores: ChunkedScores
    least: torch.Tensor
    kept: torch.Tensor
    top_p: torch.Tensor

    def narrow_(
        self, found: torch.Tensor, pending: torch.Tensor, width: int, masses: torch.Tensor | None
    ) -> torch.Tensor:
        """Raise `found` [rows] in place where `width` of the largest scores tell the cutoff; return the other rows.

        `pending` int64 [n] are the rows to look at; `masses` see `thresholds`.
        """
        vocabulary, chunks = self.scores.source.vocabulary, self.scores.maxima.shape[1]
        width = width if width < chunks else vocabulary
        read = min(width * self.scores.source.width, vocabulary)
        unsettled = []
        for rows in torch.split(pending, max(1, block_numbers(pending.device) // read)):
            threshold, settled = self.thresholds(rows, width, masses)
            found[rows[settled]] = torch.maximum(self.least[rows], threshold)[settled]
            unsettled.append(rows[~settled])
        return torch.cat(unsettled)

    def thresholds(
        self, rows: torch.Tensor, width: int, masses: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each row's smallest kept score, and whether `width` of its largest scores were enough to tell.

        `masses` float32 [rows of `scores`] is what top-p takes a part of where top-k is off. Without it bounds must
        do: they settle most rows, as they would be settled with it, and spare them a pass over all scores.
        """
        vocabulary, kept = self.scores.source.vocabulary, self.kept[rows].unsqueeze(-1)
        top_p, least = self.top_p[rows].unsqueeze(-1), self.least[rows].unsqueeze(-1)
        ordered = self.scores.largest(rows, width)
        mass = _running_sums(_weights_(ordered.clone(), least))
        last_of_top_k = kept.clamp(max=width) - 1
        if masses is None:
            unseen = torch.minimum(self.scores.maxima[rows], ordered[:, -1:])
            unseen_mass = self.scores.source.width * _sums_(_weights_(unseen, least)).unsqueeze(-1)
            totals = [mass[:, -1:] * (1 - _MASS_SLACK), (mass[:, -1:] + unseen_mass) * (1 + _MASS_SLACK)]
        else:
            totals = [masses[rows].unsqueeze(-1)]
        of_top_k, lasts = mass.gather(-1, last_of_top_k), []
        for total in totals:
            # The first token with which the sum reaches top_p is the last inside.
            wanted = top_p * torch.where(kept < vocabulary, of_top_k, total)
            reached = torch.where(top_p < 1, torch.searchsorted(mass, wanted), vocabulary)
            lasts.append(torch.minimum(last_of_top_k, reached.clamp(max=width - 1)))
        last = lasts[-1]
        # Top-k must fit, for the mass that it leaves; without top-k, the cut of top-p must lie inside what was seen.
        settled = (kept <= width) | ((kept == vocabulary) & (last < width - 1))
        return ordered.gather(-1, last).squeeze(-1), (settled & (lasts[0] == last)).squeeze(-1)


def _masses(scores: ChunkedScores, least: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return float32 [rows of `scores`]: the sum of exp(score) over scores from `least` on; 0 outside `rows`."""
    masses = torch.zeros_like(least)
    for block in torch.split(rows, max(1, block_numbers(least.device) // scores.source.vocabulary)):
        masses[block] = _sums_(_weights_(scores.dense(block), least[block].unsqueeze(-1)))
    return masses


def _weights_(scores: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
    """Return exp(scores) [rows, n] in place, 0 for scores below `least` [rows, 1]."""
    if bool((least > -torch.inf).any()):
        scores.masked_fill_(scores < least, -torch.inf)
    return scores.exp_()


def whole_row_cutoffs(
    scores: torch.Tensor, min_p: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """Return what `cutoffs` does for `scores` float32 [rows, V] that are all there, by sorting them."""
    vocabulary, least = scores.shape[1], min_p.log()
    if not bool(((top_k > 0) | (top_p < 1)).any()):
        return least
    kept = torch.where((top_k > 0) & (top_k < vocabulary), top_k, vocabulary).unsqueeze(-1)
    ordered = descending(scores)
    mass = _running_sums(_weights_(ordered.clone(), least.unsqueeze(-1)))
    # The first token with which the sum reaches top_p is the last inside.
    reached = torch.searchsorted(mass, top_p.unsqueeze(-1) * mass.gather(-1, kept - 1))
    last = torch.minimum(kept - 1, torch.where(top_p.unsqueeze(-1) < 1, reached, vocabulary))
    return torch.maximum(least, ordered.gather(-1, last).squeeze(-1))


def _sums_(values: torch.Tensor) -> torch.Tensor:
    """Return [rows], the sums of `values` [rows, n], which it overwrites, by adding one half to the other.

    torch's own sum adds in another order when there are more rows; here the order depends on n alone.
    """
    left = values.shape[-1]
    while left > 1:
        half = left // 2
        values[:, :half] += values[:, left - half : left]
        left -= half
    return values[:, 0]


def _running_sums(values: torch.Tensor) -> torch.Tensor:
    """Return the sums of `values` [rows, n] up to each, [rows, n], in an order that depends on neither rows nor n."""
    # On the CPU torch goes from left to right; elsewhere it makes blocks by the number of rows.
    return values.cumsum(dim=-1) if values.device.type == "cpu" else _running_sums_by_pairs(values)


def _running_sums_by_pairs(values: torch.Tensor) -> torch.Tensor:
    """Return what `_running_sums` does. Sums over pairs give every second sum, one addition each the others.

    Blelloch 1990, "Prefix sums and their applications", section 1.3.
    """
    length = values.shape[-1]
    if length == 1:
        return values
    even, odd = values[:, 0::2], values[:, 1::2]
    of_pairs = _running_sums_by_pairs(even[:, : length // 2] + odd)
    sums = torch.empty_like(values)
    sums[:, 1::2] = of_pairs
    sums[:, :1] = even[:, :1]
    torch.add(of_pairs[:, : (length - 1) // 2], even[:, 1:], out=sums[:, 2::2])
    return sums
