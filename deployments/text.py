"""Text to token ids and back for one model: its tokenizer, its chat template and its end-of-sequence ids."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from deployments.chat_template import Conversation, render
from deployments.token_bytes import TokenBytes
from workers.decoding.detokenizer import PRIMING_TOKENS, IncrementalDetokenizer
from workers.engine.model_files import is_gguf, model_folder
from workers.errors import ConfigurationError
from workers.messages import TokenIds, token_ids

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

# Tokenising this much takes a few milliseconds, which is when other requests on the event loop would notice.
LONG_TEXT_CHARACTERS = 20_000
T = TypeVar("T")


class TextCodec:
    """Encodes prompts and conversations, and makes detokenizers. Safe to use from several threads.

    `backend` is the underlying `tokenizers.Tokenizer`, `token_bytes` says what its tokens stand for, `end_token_ids`
    is every id that ends a completion, and `vocabulary_size` one more than the largest id (embedding rows beyond it
    are padding).
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", end_token_ids: frozenset[int] = frozenset()) -> None:
        """Wrap a fast tokenizer of transformers; its own end-of-sequence id is added to `end_token_ids`."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ConfigurationError(f"{tokenizer.name_or_path}: the model has no fast tokenizer (tokenizer.json)")
        self._tokenizer = tokenizer
        self.backend: Tokenizer = backend
        # Set once here: changing them per call, as transformers does, would race with encoding in another thread.
        self.backend.no_truncation()
        self.backend.no_padding()
        self.token_bytes = TokenBytes(self.backend)
        self.vocabulary_size = max(self.backend.get_vocab(with_added_tokens=True).values()) + 1
        own_end = tokenizer.eos_token_id
        self.end_token_ids = end_token_ids | ({own_end} if isinstance(own_end, int) else frozenset())

    @classmethod
    def load(cls, model: str) -> "TextCodec":
        """Load from an id, a local folder or a GGUF file. ConfigurationError if there is no usable tokenizer."""
        try:
            files = str(model_folder(model) or model) if is_gguf(model) else model
            return cls(_load_tokenizer(files), _read_end_token_ids(files))
        except (OSError, ValueError, KeyError) as error:
            reason = (str(error).strip() or repr(error)).splitlines()[0]
            raise ConfigurationError(f"{model}: cannot load the tokenizer: {reason}") from error

    def encode(self, text: str, special_tokens: bool = True) -> TokenIds:
        """Return the ids of a completion prompt, with the special tokens that the tokenizer adds by default."""
        return token_ids(self.backend.encode(text, add_special_tokens=special_tokens).ids)

    def token_starts(self, text: str) -> list[int]:
        """Return where in `text` each token of `encode` begins, as the tokenizer accounts for it."""
        return [start for start, _ in self.backend.encode(text, add_special_tokens=True).offsets]

    def decode(self, ids: Sequence[int], special_tokens: bool = False) -> str:
        """Return the text of `ids` by themselves, without special tokens unless asked for."""
        text: str = self.backend.decode(list(ids), skip_special_tokens=not special_tokens)
        return text

    def encode_word(self, word: str) -> tuple[int, ...]:
        """Return the ids of a piece of text by itself, without special tokens."""
        return tuple(self.backend.encode(word, add_special_tokens=False).ids)

    def encode_chat(self, conversation: Conversation | Sequence[Mapping[str, Any]]) -> TokenIds:
        """Return the ids of a conversation, or of messages up to where the assistant answers.

        InvalidRequestError as `deployments.chat_template.render` says.
        """
        if not isinstance(conversation, Conversation):
            conversation = Conversation(conversation)
        text = render(self._tokenizer, conversation)
        # The template has written the special tokens already; adding them again would double the BOS.
        return token_ids(self.backend.encode(text, add_special_tokens=False).ids)

    def detokenizer(self, prompt: TokenIds) -> IncrementalDetokenizer:
        """Return a detokenizer for one completion of `prompt`."""
        return IncrementalDetokenizer(self.backend, prompt[-PRIMING_TOKENS:].tolist())


async def off_loop_if_long(characters: int, work: Callable[[], T]) -> T:
    """Run `work` in a thread when it handles so much text that it would hold up the event loop."""
    return await asyncio.to_thread(work) if characters > LONG_TEXT_CHARACTERS else work()


def _find_file(model: str, name: str) -> Path | None:
    from transformers.utils.hub import cached_file

    found = cached_file(
        model, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
    )
    return Path(found) if found else None


def _load_tokenizer(model: str) -> "PreTrainedTokenizerBase":
    if _find_file(model, "tokenizer.json") is None:
        from transformers import AutoTokenizer

        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
        return tokenizer
    # The same tokenizer as AutoTokenizer's, without reading the model's configuration class, which imports torch.
    from transformers.tokenization_utils_tokenizers import TokenizersBackend

    fast: PreTrainedTokenizerBase = TokenizersBackend.from_pretrained(model)
    return fast


def _read_end_token_ids(model: str) -> frozenset[int]:
    ends: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        path = _find_file(model, name)
        if path is None:
            continue
        settings = json.loads(path.read_text("utf-8"))
        found = settings.get("eos_token_id", settings.get("text_config", {}).get("eos_token_id"))
        ends.update([found] if isinstance(found, int) else found or [])
    return frozenset(ends)
