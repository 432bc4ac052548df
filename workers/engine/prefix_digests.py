"""Names of KV blocks by their content: a digest stands for a block's tokens and for all tokens before them."""

from hashlib import blake2b

from workers.messages import TokenIds

_DIGEST_BYTES = 32


def root_digest(salt: str | None) -> bytes:
    """Return what the first block's digest builds on; blocks of different salts never have the same digest."""
    return blake2b(b"" if salt is None else b"salt:" + salt.encode(), digest_size=_DIGEST_BYTES).digest()


def next_digest(parent: bytes, tokens: TokenIds) -> bytes:
    """Return the digest of a block that holds `tokens` int32 [block_tokens] behind the block of `parent`.

    Equal digests are taken for equal tokens, so this has to withstand somebody who looks for collisions.
    """
    return blake2b(parent + tokens.astype("<i4", copy=False).tobytes(), digest_size=_DIGEST_BYTES).digest()
