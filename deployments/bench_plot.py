"""The result of `leadout bench` as a picture: an SVG, written without a library."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from deployments.endpoint_bench import Level, Percentiles

WIDTH, HEIGHT = 360, 260
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 40, 44
COLOURS = ("#1f6feb", "#d9822b", "#c0392b")
GRID_LINES = 4


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a panel: a value per level, None where there is none."""

    name: str
    values: tuple[float | None, ...]


def plot(levels: Sequence[Level], title: str) -> str:
    """Return an SVG of throughput and of the percentiles of three times, over concurrency."""
    panels = [
        ("output tokens per second", [Series("tokens/s", tuple(level.tokens_per_s for level in levels))]),
        ("time to first token, ms", _percentile_series(levels, lambda level: level.ttft_ms)),
        ("between events, ms", _percentile_series(levels, lambda level: level.itl_ms)),
        ("per output token, ms", _percentile_series(levels, lambda level: level.tpot_ms)),
    ]
    labels = [str(level.concurrency) for level in levels]
    width, height = 2 * WIDTH, 2 * HEIGHT + 32
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11" fill="#333">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="{width / 2:g}" y="22" text-anchor="middle" font-size="14">{escape(title)}</text>',
    ]
    for index, (name, series) in enumerate(panels):
        x, y = index % 2 * WIDTH, 32 + index // 2 * HEIGHT
        parts += [f'<g transform="translate({x} {y})">', *_panel(name, labels, series), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _percentile_series(levels: Sequence[Level], of: Callable[[Level], Percentiles | None]) -> list[Series]:
    found = [of(level) for level in levels]
    return [
        Series(name, tuple(None if each is None else getattr(each, name) for each in found))
        for name in ("p50", "p95", "p99")
    ]


def _panel(name: str, labels: Sequence[str], series: Sequence[Series]) -> list[str]:
    top = _round_up(max((value for each in series for value in each.values if value is not None), default=1.0))
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    step = (right - LEFT) / max(1, len(labels) - 1)

    def across(index: int) -> float:
        return LEFT + (index * step if len(labels) > 1 else (right - LEFT) / 2)

    def up(value: float) -> float:
        return bottom - value / top * (bottom - TOP)

    parts = [f'<text x="{LEFT}" y="16" font-weight="bold">{escape(name)}</text>']
    for line in range(GRID_LINES + 1):
        value = top * line / GRID_LINES
        parts.append(f'<path d="M{LEFT} {up(value):.1f}H{right}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{up(value) + 4:.1f}" text-anchor="end">{value:g}</text>')
    for index, label in enumerate(labels):
        parts.append(f'<text x="{across(index):.1f}" y="{bottom + 16}" text-anchor="middle">{escape(label)}</text>')
    parts.append(f'<text x="{(LEFT + right) / 2:g}" y="{bottom + 34}" text-anchor="middle">requests in flight</text>')
    for place, (each, colour) in enumerate(zip(series, COLOURS, strict=False)):
        points = [(across(i), up(value)) for i, value in enumerate(each.values) if value is not None]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
        if len(series) > 1:
            parts.append(f'<text x="{LEFT + 40 * place}" y="32" fill="{colour}">{escape(each.name)}</text>')
    return parts


def _round_up(value: float) -> float:
    """Return the next of 1, 2, 4, 5, 8, 10 times a power of ten, so that grid lines have short labels."""
    if value <= 0:
        return 1.0
    unit = 1.0
    while unit * 10 < value:
        unit *= 10
    while unit > value:
        unit /= 10
    return next((unit * each for each in (1, 2, 4, 5, 8) if unit * each >= value), unit * 10)
