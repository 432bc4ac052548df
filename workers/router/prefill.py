"""How many prompt tokens a step may read beside streams that decode: few enough that nobody sees them stall."""

from dataclasses import dataclass

from workers.router.step_times import StepTimeFit, StepTimes, fit_line

__all__ = ["PrefillLimits", "StepTimeFit", "StepTimes", "fit_line"]


@dataclass(frozen=True, slots=True)
class PrefillLimits:
    """At most `most_tokens` prompt tokens in a step and, beside streams, a step of `latency_factor` times its length.

    However slow the steps are, `least_tokens` of the prompts are read, so that they come to an end.
    """

    most_tokens: int
    least_tokens: int
    latency_factor: float

    def prompt_tokens(self, decoding_tokens: int, fit: StepTimeFit | None) -> int:
        """Return how many prompt tokens may join a step with `decoding_tokens` tokens of streams and their drafts."""
        if decoding_tokens == 0:
            return self.most_tokens
        if fit is None:
            return min(self.least_tokens, self.most_tokens)
        if fit.token_ms == 0:
            return self.most_tokens
        spare_ms = (self.latency_factor - 1) * fit.time_ms(decoding_tokens)
        fitting = int(min(spare_ms / fit.token_ms, self.most_tokens))
        return min(max(fitting, self.least_tokens), self.most_tokens)
