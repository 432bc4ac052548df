"""Simulated runs as a picture: an SVG, written without a library."""

from collections.abc import Callable, Mapping, Sequence
from html import escape

from cluster.simulator import Outcome, Sample

WIDTH, HEIGHT = 720, 150
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 26, 24
COLOURS = ("#1f6feb", "#d9822b", "#7a7a7a")
Value = Callable[[Sample], float | None]
PANELS: Mapping[str, Value] = {
    "requests in service or waiting": lambda sample: sample.running + sample.waiting,
    "target replicas (starting and draining included)": lambda sample: sample.replicas[0],
    "drafter replicas": lambda sample: sample.replicas[1],
    "time to first token, p95 of 30 s, ms (capped at 10 s)": lambda sample: _capped(sample.ttft_ms, 10_000.0),
    "between tokens, p95 of 30 s, ms": lambda sample: sample.itl_ms,
    "cost so far, GPU-hours": lambda sample: sample.gpu_hours,
}


def plot(title: str, outcomes: Mapping[str, Outcome]) -> str:
    """Return an SVG with one panel for each measure and one line for each policy, over the minutes of the trace."""
    height = 56 + len(PANELS) * HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="11" fill="#333">',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        f'<text x="{LEFT}" y="20" font-size="14">{escape(title)} (simulated)</text>',
    ]
    for place, (name, colour) in enumerate(zip(outcomes, COLOURS, strict=False)):
        parts.append(f'<text x="{LEFT + 200 * place}" y="40" fill="{colour}" font-weight="bold">{escape(name)}</text>')
    for index, (name, value) in enumerate(PANELS.items()):
        lines = [[(sample.at_s, value(sample)) for sample in outcome.samples] for outcome in outcomes.values()]
        parts += [f'<g transform="translate(0 {50 + index * HEIGHT})">', *_panel(name, lines), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(name: str, lines: Sequence[Sequence[tuple[float, float | None]]]) -> list[str]:
    most = max((value for line in lines for _, value in line if value is not None), default=1.0) or 1.0
    end_s = max((at_s for line in lines for at_s, _ in line), default=1.0) or 1.0
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = [f'<text x="{LEFT}" y="14">{escape(name)}</text>']
    for share in (0.0, 0.5, 1.0):
        y = bottom - share * (bottom - TOP)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{right}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{share * most:.3g}</text>')
    for minute in range(0, int(end_s / 60) + 1, 20):
        x = LEFT + minute * 60 / end_s * (right - LEFT)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{minute}</text>')
    for line, colour in zip(lines, COLOURS, strict=False):
        points = (
            f"{LEFT + at_s / end_s * (right - LEFT):.1f},{bottom - value / most * (bottom - TOP):.1f}"
            for at_s, value in line[::2]
            if value is not None
        )
        parts.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
    return parts


def _capped(value: float | None, most: float) -> float | None:
    return None if value is None else min(value, most)
