"""Small tokenizers, made on the spot."""

import re
from collections.abc import Callable, Sequence

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from tokenizers.trainers import BpeTrainer
from transformers.tokenization_utils_tokenizers import TokenizersBackend

END_OF_TEXT = "<|endoftext|>"
PLAIN_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'odd' %}{{ raise_exception('odd') }}"
    "{% endif %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def byte_tokenizer(
    chat_template: str | None = PLAIN_TEMPLATE, texts: Sequence[str] = (), merges: int = 0
) -> TokenizersBackend:
    """Return a tokenizer with one token per byte (ids 1 to 256) and an end-of-text token (id 0), 257 ids in all.

    Further ids are for up to `merges` tokens of several bytes, those that make `texts` shortest.
    """
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(
        vocab_size=257 + merges, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    build: Callable[..., TokenizersBackend] = TokenizersBackend
    return build(tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, chat_template=chat_template)


def piece_tokenizer(pieces: Sequence[str]) -> Tokenizer:
    """Return a tokenizer whose id n is the whole text `pieces[n]`: decoding joins pieces, whatever they are."""
    # A word-level vocabulary must not name a word twice; the decoder cuts the number off again.
    vocabulary = {f"{index:04d}{piece}": index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=next(iter(vocabulary))))
    tokenizer.decoder = decoders.Sequence([decoders.Replace(Regex("^[0-9]{4}"), ""), decoders.Fuse()])
    return tokenizer


def word_tokenizer(words: Sequence[str]) -> TokenizersBackend:
    """Return a tokenizer of `words` and an end-of-text token; texts are cut into the longest words from the left."""
    vocabulary = {word: index for index, word in enumerate([END_OF_TEXT, *words])}
    longest_first = sorted(words, key=len, reverse=True)
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=END_OF_TEXT))
    pattern = Regex("|".join(map(re.escape, longest_first)))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern, behavior="isolated")
    build: Callable[..., TokenizersBackend] = TokenizersBackend
    return build(tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, chat_template=PLAIN_TEMPLATE)
