"""From a validated request to the sequences that the router generates: tokens, budgets and the deployment's limits."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from deployments.access import AccessRules
from deployments.grammar_check import GrammarCheck
from deployments.openai_fields import Prompt
from deployments.openai_schema import (
    MAX_DRAFT_TOKENS,
    ChatCompletionRequest,
    CompletionRequest,
    GenerationFields,
    SpeculationFields,
)
from deployments.request_headers import RequestContext
from deployments.sampling_options import SamplingPlan, plan_sampling
from deployments.text import TextCodec, off_loop_if_long
from deployments.visible_text import EchoedPrompt, echo_of_ids, echo_of_text
from workers.errors import ContextLengthError, InvalidRequestError, ModelNotFoundError
from workers.messages import (
    GenerationRequest,
    SpeculationOptions,
    TokenIds,
    Verification,
    token_ids,
)

DEFAULT_COMPLETION_TOKENS = 16
MAX_SEQUENCES = 64


@dataclass(frozen=True, slots=True)
class ServingLimits:
    """What this deployment serves and how much of it one request may ask.

    `most_sequences` is how many sequences of clients all routers together hold at most, running and waiting, and
    `most_running` how many each of them runs; None if unknown.
    """

    served_model_name: str
    context_length: int
    vocabulary_size: int
    request_timeout_s: float = 600.0
    max_body_bytes: int = 4 * 2**20
    drafter_names: tuple[str, ...] = ()
    max_draft_tokens: int = MAX_DRAFT_TOKENS
    access: AccessRules = field(default_factory=AccessRules)
    most_sequences: int | None = None
    most_running: int | None = None

    def check_model(self, name: str | None) -> None:
        """ModelNotFoundError unless `name` is the served model; None is whichever that is."""
        if name not in (None, self.served_model_name):
            raise ModelNotFoundError(f"The model {name!r} does not exist.", "model")


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """The sequences of an answer, one per choice in the order of their index: all of a prompt, then the next one's.

    `prompt_tokens` counts each prompt once. `echoed` has the prompt of each sequence if prompts are shown.
    """

    sequences: tuple[GenerationRequest, ...]
    prompt_tokens: int
    echoed: tuple[EchoedPrompt, ...] = ()

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seed of each sequence, given or drawn."""
        return tuple(sequence.sampling.seed for sequence in self.sequences)


@dataclass(frozen=True, slots=True)
class Planner:
    """Turns requests into `AnswerPlan`s."""

    codec: TextCodec
    limits: ServingLimits
    grammars: GrammarCheck

    async def plan_completion(self, request: CompletionRequest, answer_id: str, context: RequestContext) -> AnswerPlan:
        """Plan n sequences per prompt. InvalidRequestError, ContextLengthError or ModelNotFoundError."""
        self._check(request)
        self._check_completion(request)
        sampling = await self._plan_sampling(request)
        # All together: many prompts, each short, take as long as one long prompt.
        prompts = await off_loop_if_long(_length(request), lambda: list(map(self._prompt_ids, request.prompt)))
        budgets = [self._budget(prompt, request, "prompt", DEFAULT_COMPLETION_TOKENS) for prompt in prompts]
        plan = self._plan(prompts, budgets, request, sampling, answer_id, context)
        return await self._with_echo(plan, request) if request.echo else plan

    async def plan_chat(self, request: ChatCompletionRequest, answer_id: str, context: RequestContext) -> AnswerPlan:
        """Plan the n sequences that continue the conversation. Errors as in `plan_completion`."""
        self._check(request)
        sampling = await self._plan_sampling(request)
        prompt = await off_loop_if_long(request.characters, lambda: self.codec.encode_chat(request.conversation))
        budget = self._budget(prompt, request, "messages", self.limits.context_length)
        return self._plan([prompt], [budget], request, sampling, answer_id, context)

    async def _plan_sampling(self, request: GenerationFields) -> SamplingPlan:
        structure = request.structured_output()
        if structure is not None:
            await self.grammars.check(*structure)
        characters = sum(map(len, request.bad_words))
        return await off_loop_if_long(
            characters, lambda: plan_sampling(request, self.codec, self.limits.vocabulary_size)
        )

    def _check(self, request: GenerationFields) -> None:
        self.limits.check_model(request.model)
        drafter, draft_tokens = request.speculation.drafter, request.speculation.max_draft_tokens
        if drafter is not None and drafter not in self.limits.drafter_names:
            known = ", ".join(self.limits.drafter_names) or "none"
            message = f"speculation.drafter: there is no drafter {drafter!r}; known drafters: {known}."
            raise InvalidRequestError(message, "speculation.drafter")
        if draft_tokens is not None and draft_tokens > self.limits.max_draft_tokens:
            message = f"speculation.max_draft_tokens: at most {self.limits.max_draft_tokens} here, not {draft_tokens}."
            raise InvalidRequestError(message, "speculation.max_draft_tokens")

    def _check_completion(self, request: CompletionRequest) -> None:
        if len(request.prompt) * request.n > MAX_SEQUENCES:
            message = f"n: {request.n} choices for each of {len(request.prompt)} prompts are more than {MAX_SEQUENCES}."
            raise InvalidRequestError(message, "n")
        if request.max_tokens == 0 and not request.echo:
            raise InvalidRequestError("max_tokens: must be at least 1 unless echo is true.", "max_tokens")

    def _prompt_ids(self, prompt: Prompt) -> TokenIds:
        if isinstance(prompt, str):
            return self.codec.encode(prompt)
        if max(prompt) >= self.limits.vocabulary_size:
            message = f"prompt: token id {max(prompt)} is not below the vocabulary size {self.limits.vocabulary_size}."
            raise InvalidRequestError(message, "prompt")
        return token_ids(prompt)

    def _budget(self, prompt: TokenIds, request: GenerationFields, prompt_param: str, default: int) -> int:
        """Return how many tokens may be generated after `prompt`; without a limit, `default` or what is left."""
        context, used, asked = self.limits.context_length, len(prompt), request.token_limit
        if used == 0:
            raise InvalidRequestError(f"{prompt_param}: holds no tokens.", prompt_param)
        least = 0 if asked == 0 else 1
        if used + least > context:
            message = f"The model's context length is {context} tokens; the prompt alone has {used} tokens."
            raise ContextLengthError(message, prompt_param)
        if asked is not None and used + asked > context:
            message = (
                f"The model's context length is {context} tokens; the prompt has {used} tokens "
                f"and max_tokens asks for {asked} more."
            )
            raise ContextLengthError(message, "max_tokens" if request.max_tokens else "max_completion_tokens")
        budget = min(default, context - used) if asked is None else asked
        if request.min_tokens > budget:
            message = f"min_tokens: {request.min_tokens} is more than the {budget} tokens that may be generated."
            raise InvalidRequestError(message, "min_tokens")
        return budget

    def _plan(
        self,
        prompts: Sequence[TokenIds],
        budgets: Sequence[int],
        request: GenerationFields,
        sampling: SamplingPlan,
        answer_id: str,
        context: RequestContext,
    ) -> AnswerPlan:
        sequences = [
            GenerationRequest(
                request_id=f"{answer_id}-{index * request.n + choice}",
                prompt=prompt,
                sampling=replace(params, choice=choice),
                stop=sampling.stop(budget),
                speculation=_speculation(request.speculation),
                timeout_s=context.timeout_s,
                trace_context=context.trace_context,
                logprobs=request.likeliest_tokens,
                cache_salt=request.cache_salt,
                traffic_class=request.traffic_class,
            )
            for index, (prompt, budget) in enumerate(zip(prompts, budgets, strict=True))
            for params in [sampling.params()]
            for choice in range(request.n)
        ]
        return AnswerPlan(tuple(sequences), sum(map(len, prompts)))

    async def _with_echo(self, plan: AnswerPlan, request: CompletionRequest) -> AnswerPlan:
        """Return `plan` with its prompts shown, and scored if log-probabilities are asked for."""
        ids = [sequence.prompt for sequence in plan.sequences[:: request.n]]
        echoes = await off_loop_if_long(_length(request), lambda: list(map(self._echo, request.prompt, ids)))
        scored = request.logprobs is not None
        return replace(
            plan,
            sequences=tuple(replace(sequence, prompt_logprobs=scored) for sequence in plan.sequences),
            echoed=tuple(echo for echo in echoes for _ in range(request.n)),
        )

    def _echo(self, prompt: Prompt, ids: TokenIds) -> EchoedPrompt:
        return echo_of_text(self.codec, prompt, ids) if isinstance(prompt, str) else echo_of_ids(self.codec, ids)


def _length(request: CompletionRequest) -> int:
    """Return the characters or ids of all prompts together."""
    return sum(map(len, request.prompt))


def _speculation(fields: SpeculationFields) -> SpeculationOptions:
    verification = None if fields.verification is None else Verification(fields.verification)
    return SpeculationOptions(fields.enabled, fields.max_draft_tokens, fields.drafter, verification)
