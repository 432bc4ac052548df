"""Shapes of well-known models, for plans without their files. The numbers are those of their published config.json."""

from cluster.model_shapes import ModelShape


def _llama(name: str, sizes: tuple[int, int, int, int, int, int], context: int, tied: bool = False) -> ModelShape:
    return ModelShape(name, *sizes, vocabulary=128_256, context_tokens=context, tied=tied)


def _qwen(name: str, sizes: tuple[int, int, int, int, int, int], vocabulary: int, tied: bool = False) -> ModelShape:
    return ModelShape(name, *sizes, vocabulary=vocabulary, context_tokens=32_768, tied=tied, qkv_bias=True)


# Layers, hidden, intermediate, heads, KV heads, head dimension.
_8B = (32, 4096, 14_336, 32, 8, 128)
_70B = (80, 8192, 28_672, 64, 8, 128)
_SHAPES = {
    shape.name: shape
    for shape in (
        _llama("Llama-3-8B", _8B, 8192),
        _llama("Llama-3-70B", _70B, 8192),
        _llama("Llama-3.1-8B", _8B, 131_072),
        _llama("Llama-3.1-70B", _70B, 131_072),
        _llama("Llama-3.2-1B", (16, 2048, 8192, 32, 8, 64), 131_072, tied=True),
        _llama("Llama-3.2-3B", (28, 3072, 8192, 24, 8, 128), 131_072, tied=True),
        _llama("Llama-3.3-70B", _70B, 131_072),
        _qwen("Qwen2.5-0.5B", (24, 896, 4864, 14, 2, 64), 151_936, tied=True),
        _qwen("Qwen2.5-1.5B", (28, 1536, 8960, 12, 2, 128), 151_936, tied=True),
        _qwen("Qwen2.5-3B", (36, 2048, 11_008, 16, 2, 128), 151_936, tied=True),
        _qwen("Qwen2.5-7B", (28, 3584, 18_944, 28, 4, 128), 152_064),
        _qwen("Qwen2.5-14B", (48, 5120, 13_824, 40, 8, 128), 152_064),
        _qwen("Qwen2.5-32B", (64, 5120, 27_648, 40, 8, 128), 152_064),
        _qwen("Qwen2.5-72B", (80, 8192, 29_568, 64, 8, 128), 152_064),
    )
}
KNOWN_MODELS = tuple(_SHAPES)


def known_shape(model: str) -> ModelShape | None:
    """Return the shape of a Hugging Face id such as `meta-llama/Llama-3.1-70B-Instruct`, or None if it is not known."""
    name = model.rpartition("/")[2].removeprefix("Meta-").removesuffix("-Instruct")
    return _SHAPES.get(name.replace("Qwen2.5-Coder-", "Qwen2.5-"))
