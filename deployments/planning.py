"""From a validated request to the sequences that the router generates: tokens, budgets and the deployment's limits."""

from collections.abc import Sequence
from dataclasses import dataclass

from deployments.grammar_check import GrammarCheck
from deployments.openai_fields import Prompt
from deployments.openai_schema import (
    MAX_DRAFT_TOKENS,
    ChatCompletionRequest,
    CompletionRequest,
    GenerationFields,
    SpeculationFields,
)
from deployments.sampling_options import SamplingPlan, plan_sampling
from deployments.text import TextCodec, off_loop_if_long
from workers.errors import ContextLengthError, InvalidRequestError, ModelNotFoundError
from workers.messages import (
    GenerationRequest,
    SpeculationOptions,
    TokenIds,
    token_ids,
)

DEFAULT_COMPLETION_TOKENS = 16


@dataclass(frozen=True, slots=True)
class ServingLimits:
    """What this deployment serves and how much of it one request may ask."""

    served_model_name: str
    context_length: int
    vocabulary_size: int
    request_timeout_s: float = 600.0
    max_body_bytes: int = 4 * 2**20
    drafter_names: tuple[str, ...] = ()
    max_draft_tokens: int = MAX_DRAFT_TOKENS


@dataclass(frozen=True, slots=True)
class Planner:
    """Turns requests into `GenerationRequest`s, one per choice in the order of their index."""

    codec: TextCodec
    limits: ServingLimits
    grammars: GrammarCheck

    async def plan_completion(
        self, request: CompletionRequest, answer_id: str, trace_context: dict[str, str]
    ) -> tuple[GenerationRequest, ...]:
        """Plan one sequence per prompt. InvalidRequestError, ContextLengthError or ModelNotFoundError."""
        self._check(request)
        sampling = await self._plan_sampling(request)
        prompts = [await self._prompt_ids(prompt) for prompt in request.prompt]
        budgets = [self._budget(prompt, request, "prompt", DEFAULT_COMPLETION_TOKENS) for prompt in prompts]
        return self._requests(prompts, budgets, request, sampling, answer_id, trace_context)

    async def plan_chat(
        self, request: ChatCompletionRequest, answer_id: str, trace_context: dict[str, str]
    ) -> tuple[GenerationRequest, ...]:
        """Plan the sequence that continues the conversation. Errors as in `plan_completion`."""
        self._check(request)
        sampling = await self._plan_sampling(request)
        messages = [message.for_template() for message in request.messages]
        characters = sum(len(message["content"]) for message in messages)
        prompt = await off_loop_if_long(characters, lambda: self.codec.encode_chat(messages))
        budget = self._budget(prompt, request, "messages", self.limits.context_length)
        return self._requests([prompt], [budget], request, sampling, answer_id, trace_context)

    async def _plan_sampling(self, request: GenerationFields) -> SamplingPlan:
        structure = request.structured_output()
        if structure is not None:
            await self.grammars.check(*structure)
        characters = sum(map(len, request.bad_words))
        return await off_loop_if_long(
            characters, lambda: plan_sampling(request, self.codec, self.limits.vocabulary_size)
        )

    def _check(self, request: GenerationFields) -> None:
        if request.model not in (None, self.limits.served_model_name):
            raise ModelNotFoundError(f"The model {request.model!r} does not exist.", "model")
        drafter, draft_tokens = request.speculation.drafter, request.speculation.max_draft_tokens
        if drafter is not None and drafter not in self.limits.drafter_names:
            known = ", ".join(self.limits.drafter_names) or "none"
            message = f"speculation.drafter: there is no drafter {drafter!r}; known drafters: {known}."
            raise InvalidRequestError(message, "speculation.drafter")
        if draft_tokens is not None and draft_tokens > self.limits.max_draft_tokens:
            message = f"speculation.max_draft_tokens: at most {self.limits.max_draft_tokens} here, not {draft_tokens}."
            raise InvalidRequestError(message, "speculation.max_draft_tokens")

    async def _prompt_ids(self, prompt: Prompt) -> TokenIds:
        if isinstance(prompt, str):
            return await off_loop_if_long(len(prompt), lambda: self.codec.encode(prompt))
        if max(prompt) >= self.limits.vocabulary_size:
            message = f"prompt: token id {max(prompt)} is not below the vocabulary size {self.limits.vocabulary_size}."
            raise InvalidRequestError(message, "prompt")
        return token_ids(prompt)

    def _budget(self, prompt: TokenIds, request: GenerationFields, prompt_param: str, default: int) -> int:
        """Return how many tokens may be generated after `prompt`; without a limit, `default` or what is left."""
        context, used, asked = self.limits.context_length, len(prompt), request.token_limit
        if used == 0:
            raise InvalidRequestError(f"{prompt_param}: holds no tokens.", prompt_param)
        if used >= context:
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

    def _requests(
        self,
        prompts: Sequence[TokenIds],
        budgets: Sequence[int],
        request: GenerationFields,
        sampling: SamplingPlan,
        answer_id: str,
        trace_context: dict[str, str],
    ) -> tuple[GenerationRequest, ...]:
        return tuple(
            GenerationRequest(
                request_id=f"{answer_id}-{index}",
                prompt=prompt,
                sampling=sampling.params(),
                stop=sampling.stop(budget),
                speculation=_speculation(request.speculation),
                timeout_s=self.limits.request_timeout_s,
                trace_context=trace_context,
            )
            for index, (prompt, budget) in enumerate(zip(prompts, budgets, strict=True))
        )


def _speculation(fields: SpeculationFields) -> SpeculationOptions:
    return SpeculationOptions(fields.enabled, fields.max_draft_tokens, fields.drafter)
