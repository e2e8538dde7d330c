"""The shapes of a replay's report: three charts as inline SVG, and the style sheet that colours them. None knows a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

WIDTH, LEFT, RIGHT = 760, 52, 752
TOP, BOTTOM, HEIGHT = 26, 206, 250
STRIP_TOP, STRIP_BOTTOM = 256, 286  # of the blocks asked for, below the hit rates
MIN_HEIGHT = 0.005  # as it is written with two digits: a bar of less is none
UNITS_MIN = 2  # a unit of time is shown from two of it
UNITS = (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1000))

LIGHT = "--ink:#1d2329;--paper:#fff;--faint:#d4d9df;--soft:#5b6570;--dram:#2f6db3;--ssd:#d97d21;--device:#3a8f63;--bar:#6b5fa8"
DARK = "--ink:#e4e8ec;--paper:#15191d;--faint:#39424b;--soft:#a0abb6;--dram:#6aa5e8;--ssd:#f0a24f;--device:#66c492;--bar:#a99be6"
STYLE = f"""
:root{{color-scheme:light dark;{LIGHT}}}
@media (prefers-color-scheme:dark){{:root{{{DARK}}}}}
@media print{{:root{{color-scheme:light;{LIGHT}}}
section{{break-inside:avoid}} details::details-content{{content-visibility:visible}}}}
body{{margin:0;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,sans-serif;print-color-adjust:exact;
-webkit-print-color-adjust:exact}}
main{{max-width:{WIDTH}px;margin:0 auto;padding:1.5rem 1rem}}
h1{{font-size:1.4rem;overflow-wrap:anywhere}} h2{{font-size:1.1rem;margin:2rem 0 .5rem}} p{{margin:.4rem 0}}
table{{border-collapse:collapse;font-variant-numeric:tabular-nums}}
th,td{{padding:.15rem .9rem .15rem 0;text-align:right;border-bottom:1px solid var(--faint)}} th{{font-weight:600}}
.facts th,.facts td{{text-align:left;vertical-align:top;overflow-wrap:anywhere}} .facts th{{font-weight:400;color:var(--soft)}}
svg{{display:block;width:100%;height:auto;margin:.6rem 0}}
svg text{{fill:var(--ink);font-size:12px}} svg .soft{{fill:var(--soft)}}
.grid{{stroke:var(--faint);stroke-width:1}} .axis,.mark{{stroke:var(--ink);stroke-width:1}}
.mark{{stroke-width:1.5;stroke-dasharray:5 3}}
.dram{{fill:var(--dram)}} .ssd{{fill:var(--ssd)}} .device{{fill:var(--device)}} .bar{{fill:var(--bar)}}
details{{margin:.4rem 0;overflow-x:auto}} summary{{cursor:pointer}} footer{{margin-top:2rem;color:var(--soft);font-size:.85rem}}
"""


def time_unit(span_ms: float) -> tuple[str, int]:
    """The unit to show times up to `span_ms` in, and its ms."""
    return next(((word, ms) for word, ms in UNITS if span_ms >= UNITS_MIN * ms), ("ms", 1))


def time_chart(bins: Sequence[tuple[float, int, Mapping[str, int]]], tiers: Mapping[str, str]) -> str:
    """Stacked bars of hit rate above the load. `bins`: (start ms, blocks asked for, hits by tier). `tiers`: class to words."""
    step_ms = bins[1][0] if len(bins) > 1 else 0.0
    unit, unit_ms = time_unit(step_ms * len(bins))
    parts = [_percent_grid()]
    x = float(LEFT)
    for tier, words in tiers.items():
        parts.append(f'<rect class="{tier}" x="{x:.0f}" y="4" width="12" height="12"/>')
        parts.append(f'<text x="{x + 17:.0f}" y="14">{words}</text>')
        x += 80
    width, most = (RIGHT - LEFT) / len(bins), max(n_blocks for _, n_blocks, _ in bins)
    for i, (start_ms, n_blocks, hits) in enumerate(bins):
        if not n_blocks:
            continue
        at = f"{start_ms / unit_ms:.2f} {unit}: " if step_ms else ""
        title = at + ", ".join(f"{words} {100 * hits[tier] / n_blocks:.1f} %" for tier, words in tiers.items())
        y, drawn = float(BOTTOM), ""
        for tier in tiers:
            height = (BOTTOM - TOP) * hits[tier] / n_blocks
            y -= height
            drawn += _bar(LEFT + i * width, y, width, height, tier)
        height = (STRIP_BOTTOM - STRIP_TOP) * n_blocks / most
        drawn += _bar(LEFT + i * width, STRIP_BOTTOM - height, width, height, "bar")
        parts.append(f"<g><title>{title}, of {n_blocks:,} blocks</title>{drawn}</g>")
    parts.append(_grid_line(STRIP_TOP, compact(most)) + _grid_line(STRIP_BOTTOM, "0"))
    if step_ms:
        for i in range(5):
            x, anchor = LEFT + (RIGHT - LEFT) * i / 4, "middle" if i < 4 else "end"
            value = step_ms * len(bins) * i / 4 / unit_ms
            parts.append(f'<text x="{x:.1f}" y="{BOTTOM + 17}" text-anchor="{anchor}">{value:.4g}</text>')
        parts.append(_below(f"{unit} since the first request"))
    return _svg("Hit rate over the trace's time, by tier", STRIP_BOTTOM + 8, parts)


def reuse_chart(bins: Sequence[int], step: int, lines: Mapping[str, int]) -> str:
    """A histogram: bin 0 is [0, step), bin k is [2**(k - 1) * step, 2**k * step). `lines`: words -> the distance to mark."""
    places = {words: math.log2(n / step) + 1 if n >= step else n / step for words, n in lines.items()}
    n_shown = max(len(bins), *(math.ceil(place) for place in places.values()), 1) + 1
    width, most = (RIGHT - LEFT) / n_shown, max(bins, default=0)
    parts = []
    for part in (0.0, 0.5, 1.0) if most else (0.0,):
        parts.append(_grid_line(BOTTOM - (BOTTOM - TOP) * part, compact(round(most * part))))
    for k, n in enumerate(bins):
        height = (BOTTOM - TOP) * n / max(1, most)
        low = 0 if k == 0 else step << (k - 1)
        parts.append(
            f"<g><title>{low:,} to {(step << k) - 1:,}: {n:,} uses</title>"
            f"{_bar(LEFT + k * width, BOTTOM - height, width, height, 'bar')}</g>"
        )
    every = max(1, math.ceil(n_shown * 44 / (RIGHT - LEFT)))
    for k in range(0, n_shown, every):
        edge = 0 if k == 0 else step << (k - 1)
        parts.append(f'<text x="{LEFT + k * width:.1f}" y="{BOTTOM + 17}" text-anchor="middle">{binary(edge)}</text>')
    for i, (words, place) in enumerate(places.items()):
        x, y = LEFT + place * width, 11 + 12 * i
        anchor, shift = ("end", -4) if place > n_shown * (0.75 if i else 0.25) else ("start", 4)
        parts.append(f'<line class="mark" x1="{x:.1f}" y1="{y - 8}" x2="{x:.1f}" y2="{BOTTOM}"/>')
        parts.append(f'<text x="{x + shift:.1f}" y="{y}" text-anchor="{anchor}">{words}: {lines[words]:,}</text>')
    parts.append(_below("distinct blocks used since the last use; height: uses"))
    return _svg("Reuse distances in powers of two", HEIGHT, parts)


def cause_bars(causes: Mapping[str, int]) -> str:
    """A bar each, the most frequent first. The names are HTML already."""
    most, left, right, row = max(causes.values()), 160, RIGHT - 90, 24
    parts = []
    for i, (name, n) in enumerate(sorted(causes.items(), key=lambda item: -item[1])):
        y, width = i * row + 3, (right - left) * n / max(1, most)
        parts.append(f'<text x="{left - 8}" y="{y + 13}" text-anchor="end">{name}</text>')
        parts.append(f'<rect class="bar" x="{left}" y="{y}" width="{max(1.0, width):.1f}" height="{row - 6}"/>')
        parts.append(f'<text x="{left + max(1.0, width) + 6:.1f}" y="{y + 13}">{n:,}</text>')
    return _svg("Miss causes", len(causes) * row, parts)


def compact(n: int) -> str:
    """1234567 -> "1.2M"."""
    for size, word in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if n >= size:
            return f"{n / size:.3g}{word}"
    return str(n)


def binary(n: int) -> str:
    """A power of two: 65536 -> "64Ki"."""
    for shift, word in ((40, "Ti"), (30, "Gi"), (20, "Mi"), (10, "Ki")):
        if n >= 1 << shift:
            return f"{n >> shift}{word}"
    return str(n)


def _bar(x: float, y: float, width: float, height: float, kind: str) -> str:
    if height < MIN_HEIGHT:
        return ""
    return f'<rect class="{kind}" x="{x + 0.5:.2f}" y="{y:.2f}" width="{width - 1:.2f}" height="{height:.2f}"/>'


def _percent_grid() -> str:
    return "".join(_grid_line(BOTTOM - (BOTTOM - TOP) * n / 100, f"{n} %") for n in (0, 25, 50, 75, 100))


def _grid_line(y: float, words: str) -> str:
    return (
        f'<line class="{"grid" if y < BOTTOM else "axis"}" x1="{LEFT}" y1="{y:.1f}" x2="{RIGHT}" y2="{y:.1f}"/>'
        f'<text class="soft" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{words}</text>'
    )


def _below(words: str) -> str:
    return f'<text class="soft" x="{(LEFT + RIGHT) / 2:.0f}" y="{BOTTOM + 36}" text-anchor="middle">{words}</text>'


def _svg(title: str, height: int, parts: Sequence[str]) -> str:
    body = "\n".join(parts)
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{title}">\n{body}\n</svg>\n'
