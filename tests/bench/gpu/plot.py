# SPDX-License-Identifier: Apache-2.0
"""The pictures of a run as SVG, written by hand: TFLOP/s over sequence length, one panel a head_dim and mask; memory over sequence length."""

from __future__ import annotations

import math
from html import escape

# name: (label, colour, whether the curve is dashed)
CONTENDERS = {"ours": ("libflashattn", "#c2410c", False), "fa4": ("FlashAttention-4", "#7c3aed", False),
              "cudnn": ("cuDNN (PyTorch)", "#1d4ed8", False), "fa2": ("FlashAttention-2 (PyTorch)", "#15803d", False)}
UNFUSED = {"unfused": ("unfused (PyTorch)", "#6b7280", False)}
PANEL_W, PANEL_H = 250, 170
LEFT, TOP, GAP_X, GAP_Y = 56, 64, 34, 58


def text(x, y, words, size=11, anchor="middle", color="#374151", weight="normal"):
    return (f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{color}" '
            f'font-weight="{weight}">{escape(words)}</text>')


def line(x1, y1, x2, y2, color="#e5e7eb", width=1.0, dashed=False):
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}" stroke-width="{width}"{dash}/>'


def seqlen_label(n):
    return f"{n // 1024}k" if n >= 1024 else str(n)


def legend(contenders, y):
    parts, x = [], LEFT
    for label, color, dashed in contenders.values():
        parts += [line(x, y, x + 22, y, color, 3, dashed), text(x + 28, y + 4, label, anchor="start")]
        x += 60 + 6.2 * len(label)
    return parts


def curve(points, color, dashed=False):
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    return [f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"{dash}/>',
            *(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{color}"/>' for x, y in points)]


def head(width, height, title):
    return [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            'font-family="Helvetica, Arial, sans-serif">', f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
            text(LEFT, 22, title, 14, "start", "#111827", "bold")]


def panel(x0, y0, rows, limit, step, with_scale):
    """One set of axes with its top left corner at (x0, y0); rows are of one direction, head_dim and mask."""
    seqlens = sorted({row["seqlen_q"] for row in rows})
    x_of = {n: x0 + PANEL_W * (i + 0.5) / len(seqlens) for i, n in enumerate(seqlens)}
    parts = []
    for tick in range(0, limit + 1, step):
        y = y0 + PANEL_H * (1 - tick / limit)
        parts.append(line(x0, y, x0 + PANEL_W, y, "#9ca3af" if tick == 0 else "#e5e7eb"))
        if with_scale:
            parts.append(text(x0 - 6, y + 4, str(tick), anchor="end"))
    parts += [text(x, y0 + PANEL_H + 16, seqlen_label(n)) for n, x in x_of.items()]
    for name, (_, color, dashed) in reversed(CONTENDERS.items()):
        points = [(x_of[row["seqlen_q"]], y0 + PANEL_H * (1 - row["tflops"][name] / limit)) for row in rows if name in row["tflops"]]
        parts += curve(points, color, dashed)
    return parts


def svg(data):
    """The grid of forward and backward; other sections do not fit one picture."""
    rows = [row for row in data["rows"] if row["section"] in ("forward", "backward") and row["heads_q"] == row["heads_k"]]
    if not rows:
        raise ValueError("no rows of the sections forward and backward to draw")
    directions = [name for name in ("forward", "backward") if any(row["direction"] == name for row in rows)]
    bands = [(direction, causal) for direction in directions for causal in (False, True)
             if any(row["direction"] == direction and row["causal"] == causal for row in rows)]
    head_dims = sorted({row["head_dim"] for row in rows})
    width = LEFT + len(head_dims) * (PANEL_W + GAP_X)
    height = TOP + len(bands) * (PANEL_H + GAP_Y) + 6
    parts = head(width, height, f"Attention on {data['device']}: TFLOP/s over sequence length, bf16, batch x length = 16k") + legend(CONTENDERS, 38)
    for band, (direction, causal) in enumerate(bands):
        speeds = [row["tflops"].get(name, 0) for row in rows if row["direction"] == direction for name in CONTENDERS]
        step = next(s for s in (20, 50, 100, 200, 500, 1000) if max(speeds) / s <= 7)
        limit = step * int(max(speeds) / step + 1)
        for column, head_dim in enumerate(head_dims):
            some = sorted((row for row in rows if row["direction"] == direction and row["causal"] == causal
                           and row["head_dim"] == head_dim), key=lambda row: row["seqlen_q"])
            if not some:
                continue
            x0, y0 = LEFT + column * (PANEL_W + GAP_X), TOP + 14 + band * (PANEL_H + GAP_Y)
            parts.append(text(x0, y0 - 8, f"{direction}, {'causal' if causal else 'full'}, head_dim {head_dim}", 12, "start",
                              "#111827"))
            parts += panel(x0, y0, some, limit, step, column == 0)
    return "\n".join(parts + ["</svg>"]) + "\n"


def memory_svg(data):
    """What a forward and a backward allocate beside their tensors; both axes logarithmic."""
    rows = data.get("memory", [])
    if not rows:
        raise ValueError("no section memory to draw")
    shown = {**{name: one for name, one in CONTENDERS.items() if name != "fa4"}, **UNFUSED, "tensors": ("the tensors themselves", "#9ca3af", True)}
    width, height, x0, y0, w, h = 900, 400, 84, 66, 790, 280
    values = [value for row in rows for value in (row["tensors"], *row["bytes"].values()) if value > 0]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    x_of = {row["seqlen"]: x0 + w * (n + 0.5) / len(rows) for n, row in enumerate(rows)}

    def y_of(value):
        return y0 + h * (1 - (math.log10(value) - low) / (high - low))

    parts = head(width, height, f"Memory of forward and backward on {data['device']}, causal, bf16, 16 heads of 128") + legend(shown, 42)
    for power in range(low, high + 1):
        parts += [line(x0, y_of(10**power), x0 + w, y_of(10**power)),
                  text(x0 - 8, y_of(10**power) + 4, {3: "1 kB", 4: "10 kB", 5: "100 kB", 6: "1 MB", 7: "10 MB", 8: "100 MB", 9: "1 GB", 10: "10 GB",
                                                     11: "100 GB"}.get(power, f"1e{power} B"), anchor="end")]
    parts += [text(x, y0 + h + 18, seqlen_label(n)) for n, x in x_of.items()] + [text(x0 + w / 2, y0 + h + 40, "rows of the sequence")]
    hidden = [name for name in shown if name not in ("ours", "tensors") and
              all(abs(row["bytes"].get(name, 0) / row["bytes"]["ours"] - 1) < 0.05 for row in rows)]
    if hidden:
        labels = " and ".join(shown[name][0].split(" (")[0] for name in hidden)
        parts.append(text(x0 + w, y0 + h - 12, f"{labels} lie within 5 % of libflashattn, behind its curve", anchor="end"))
    for name, (_, color, dashed) in reversed(shown.items()):
        got = [(row["seqlen"], row["tensors"] if name == "tensors" else row["bytes"].get(name)) for row in rows]
        parts += curve([(x_of[n], y_of(value)) for n, value in got if value], color, dashed)
    return "\n".join(parts + ["</svg>"]) + "\n"
