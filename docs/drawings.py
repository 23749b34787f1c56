# SPDX-License-Identifier: Apache-2.0
"""The drawings of the guides: tiles, pipelines and the stream-K partition. docs/pictures.py writes them."""
from html import escape

INK, QUIET, GRID = "#1f2937", "#6b7280", "#d1d5db"
BLUE, ORANGE, GREEN, VIOLET, GREY = "#bfdbfe", "#fed7aa", "#bbf7d0", "#ddd6fe", "#e5e7eb"
DARK = {BLUE: "#1d4ed8", ORANGE: "#c2410c", GREEN: "#15803d", VIOLET: "#6d28d9", GREY: "#6b7280"}


class Drawing:
    """Collects shapes; coordinates are pixels from the top left."""

    def __init__(self, width, height, title):
        self.width, self.height = width, height
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            'font-family="Helvetica, Arial, sans-serif">',
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0 0L8 4L0 8z" fill="{INK}"/></marker></defs>', f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
        ]
        self.text(16, 26, title, 15, "start", weight="bold")

    def text(self, x, y, words, size=12, anchor="middle", color=INK, weight="normal"):
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{color}" '
                          f'font-weight="{weight}">{escape(words)}</text>')

    def box(self, x, y, width, height, fill, words="", size=12, under="", dashed=False):
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="3" fill="{fill}" '
                          f'stroke="{DARK.get(fill, QUIET)}" stroke-width="1"{dash}/>')
        if words:
            self.text(x + width / 2, y + height / 2 + (-2 if under else 4), words, size)
        if under:
            self.text(x + width / 2, y + height / 2 + 13, under, size - 2, color=QUIET)

    def arrow(self, *points, dashed=False):
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{INK}" stroke-width="1.4" marker-end="url(#head)"{dash}/>')

    def line(self, x1, y1, x2, y2, color=GRID, width=1.0):
        self.parts.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}" stroke-width="{width}"/>')

    def legend(self, x, y, *entries, step=0):
        """entries are (fill, words), side by side, or one below the other with a step."""
        for fill, words in entries:
            self.box(x, y - 10, 14, 14, fill)
            self.text(x + 20, y + 2, words, 11, "start")
            if step:
                y += step
            else:
                x += 34 + 6.2 * len(words)

    def svg(self):
        return "\n".join(self.parts + ["</svg>"]) + "\n"


def tiles():
    """The N x N matrix that is never stored: which KV tiles a causal mask leaves, and what the main loop does with each."""
    d = Drawing(860, 400, "A query tile loops over the KV tiles that it sees")
    x0, y0, cell_w, cell_h, rows, columns = 96, 84, 30, 40, 6, 12
    d.text(x0 + cell_w * columns / 2, y0 - 26, "keys, in KV tiles")
    d.text(x0 - 12, y0 + cell_h * rows / 2 - 8, "queries, in", anchor="end")
    d.text(x0 - 12, y0 + cell_h * rows / 2 + 8, "query tiles", anchor="end")
    shown = 3
    for row in range(rows):
        for column in range(columns):
            last = 2 * row + 1  # a query tile has as many rows as two KV tiles have keys
            fill = GREY if column > last else ORANGE if column >= last - 1 else BLUE
            d.box(x0 + column * cell_w, y0 + row * cell_h, cell_w - 2, cell_h - 2, fill)
    y = y0 + shown * cell_h + cell_h / 2
    d.arrow((x0 + cell_w * (2 * shown + 2) - 6, y), (x0 + 6, y))
    d.legend(x0, y0 + rows * cell_h + 26, (BLUE, "full tile: no mask code runs"), (ORANGE, "partial tile: masked"))
    d.legend(x0, y0 + rows * cell_h + 48, (GREY, "empty tile: neither loaded nor computed"))
    x = 500
    d.text(x, 64, "Main loop, once per visible KV tile", 12, "start", weight="bold")
    steps = (("S = Q Kᵀ", "scores of one KV tile, in registers"), ("m = max(m, rowmax S)", "running row maximum"),
             ("P = exp2(S − m)", "scale and log2(e) are folded in"), ("out = out · 2^(m_old − m) + P V", "fp32 accumulator, in registers"),
             ("l = l · 2^(m_old − m) + rowsum P", "row sum: a partial sum in each lane, reduced at the end"))
    for n, (formula, note) in enumerate(steps):
        d.box(x, 80 + 46 * n, 310, 36, VIOLET if n in (1, 2, 4) else GREEN, formula, under=note)
    d.text(x, 334, "Epilogue: store out / l and lse = m + log(l).", 12, "start")
    d.legend(x, 362, (GREEN, "tensor cores"), (VIOLET, "the other units"))
    return d.svg()


def forward_pipeline():
    """Time runs to the right: the scheduler and producer warps, three consumer warpgroups of a CTA, and the tensor cores they share."""
    d = Drawing(860, 388, "Hopper forward: three consumer warpgroups keep the tensor cores busy")
    left, unit, lane_h = 150, 7.1, 44
    names = ("tile scheduler warp", "producer warp", "consumer 0", "consumer 1", "consumer 2", "tensor cores")
    tops = {name: 56 + n * (lane_h + 6) for n, name in enumerate(names)}
    for name, top in tops.items():
        d.text(left - 12, top + lane_h / 2 + 4, name, anchor="end")
        d.line(left, top + lane_h, left + 98 * unit, top + lane_h)
    d.box(left, tops["tile scheduler warp"] + 8, 12 * unit, 28, VIOLET, "query tile t", 11)
    d.box(left + 62 * unit, tops["tile scheduler warp"] + 8, 34 * unit, 28, VIOLET, "tile t + 1, claimed late", 11)
    for n in range(8):
        d.box(left + (2 + 11.6 * n) * unit, tops["producer warp"] + 8, 10.6 * unit, 28, GREY, f"{'K' if n % 2 == 0 else 'V'} {n // 2}", 11)
    # One iteration of a warpgroup: P V of a KV tile with S of the next one right behind it, then the exponentials, twice as long. So three
    # warpgroups, a third of an iteration apart, leave no gap.
    product = 6.0
    arithmetic = 4 * product
    for group in range(3):
        for n in range(4):
            t = 4 + 2 * product * group + (2 * product + arithmetic) * n
            for begin, length, fill, words in ((t, product, GREEN, f"S {n}"), (t + product, arithmetic, ORANGE, f"softmax: row max, exp2, P {n}"),
                                               (t + product + arithmetic, product, BLUE, f"P V {n}")):
                end = min(begin + length, 98)
                if end - begin < 1:
                    continue
                whole = end == begin + length
                d.box(left + begin * unit, tops[f"consumer {group}"] + 8, (end - begin) * unit - 1, 28, fill, words if whole else "", 10)
                if fill != ORANGE:
                    d.box(left + begin * unit, tops["tensor cores"] + 8, (end - begin) * unit - 1, 28, fill, f"WG {group}" if whole else "", 10)
    d.text(left + 98 * unit, 48, "time →", anchor="end", color=QUIET)
    d.legend(left, 372, (GREEN, "S = Q Kᵀ"), (BLUE, "out += P V"), (ORANGE, "softmax (no tensor cores)"), (GREY, "TMA load"))
    return d.svg()


def backward():
    """The five matrix products of a CTA's keys, and where their operands live."""
    d = Drawing(860, 408, "Backward: a CTA keeps 128 keys and loops over the query tiles that see them")
    d.box(28, 66, 150, 270, BLUE, dashed=True)
    d.text(103, 86, "shared memory", 12, weight="bold")
    for n, (words, under) in enumerate((("K, V", "128 keys, loaded once"), ("Q, dO", "TMA pipeline stages"), ("lse, delta", "pipeline stages"),
                                        ("dS", "operand of dQ only"))):
        d.box(40, 102 + 58 * n, 126, 44, "#ffffff", words, under=under, size=12)
    d.box(250, 66, 360, 270, GREEN, dashed=True)
    d.text(430, 86, "registers of two warpgroups, 64 keys each", 12, weight="bold")
    d.box(266, 102, 150, 42, "#ffffff", "S = K Qᵀ", under="product 1")
    d.box(444, 102, 150, 42, "#ffffff", "dP = V dOᵀ", under="product 2")
    d.box(266, 164, 150, 42, ORANGE, "P = exp2(S − lse)")
    d.box(444, 164, 150, 42, ORANGE, "dS = P (dP − delta)")
    d.box(266, 276, 150, 46, "#ffffff", "dV += P dO", under="product 3, accumulates")
    d.box(444, 276, 150, 46, "#ffffff", "dK += dS Q", under="product 4, accumulates")
    d.arrow((341, 144), (341, 163))
    d.arrow((519, 144), (519, 163))
    d.arrow((416, 185), (443, 185))
    d.arrow((341, 206), (341, 275))
    d.arrow((519, 206), (519, 275))
    d.arrow((178, 124), (265, 124))
    # dS goes through shared memory, because dQ needs it transposed.
    d.arrow((480, 206), (480, 240), (210, 240), (210, 298), (167, 298))
    d.text(352, 254, "rounded to 16 bits", 10, "start", QUIET)
    d.box(676, 102, 160, 46, "#ffffff", "dQ = dSᵀ K", under="product 5, one query tile")
    d.arrow((167, 312), (222, 312), (222, 354), (640, 354), (640, 125), (675, 125))
    d.box(676, 200, 160, 46, GREY, "fp32 accumulator of dQ", under="global memory")
    d.arrow((756, 148), (756, 199))
    d.text(750, 178, "TMA reduce-add", 10, "end", QUIET)
    d.box(676, 290, 160, 46, GREY, "dQ", under="scaled, in the inputs' dtype")
    d.arrow((756, 246), (756, 289))
    d.text(750, 272, "dQ kernel", 10, "end", QUIET)
    d.text(28, 378, "P and dS are the register operands of the products for dV and dK. Only dS goes through shared memory.", 12, "start")
    d.text(28, 395, "In deterministic mode the CTAs add to dQ in the order of their keys.", 12, "start")
    return d.svg()


def decode():
    """The stream-K partition: the KV tiles of all heads of all sequences, divided evenly among the CTAs on the device."""
    d = Drawing(860, 330, "Decode: a stream-K partition gives every CTA the same number of KV tiles")
    left, width, top = 28, 804, 78
    heads = (("sequence 0, head 0", 9), ("head 1", 9), ("sequence 1, head 0", 3), ("head 1", 3), ("sequence 2, head 0", 14), ("head 1", 14))
    total, x = sum(n for _, n in heads), left
    unit = width / total
    d.text(left, 50, "A work unit is one KV tile of one head of one sequence. Lengths are read on the device.", 12, "start", QUIET)
    starts = []
    for n, (name, units) in enumerate(heads):
        fill = (BLUE, GREEN, VIOLET)[n // 2]
        starts.append(x)
        for i in range(units):
            d.box(x + i * unit, top, unit - 1.5, 32, fill)
        d.text(x + units * unit / 2, top - 6, name if units > 5 else "", 10, color=QUIET)
        x += units * unit
    d.text(starts[2] + 3 * unit, top - 6, "sequence 1", 10, color=QUIET)
    ctas = 8
    for n in range(ctas):
        x0 = left + n * width / ctas
        d.box(x0 + 2, 150, width / ctas - 4, 34, ORANGE, f"CTA {n}", 11)
        d.line(x0, top + 36, x0, 148, QUIET)
        d.line(x0, top - 2, x0, top + 34, INK, 2)
    d.line(left + width, top - 2, left + width, top + 34, INK, 2)
    d.text(left, 212, "A CTA stores a partial result for each head that it shares: out and lse of its own keys, in fp32. Here head 0 of sequence 2:", 12, "start")
    begin, end = starts[4], starts[5]
    first, last = int((begin - left) / (width / ctas)), int((end - 1 - left) / (width / ctas))
    for n in range(first, last + 1):
        centre = left + (n + 0.5) * width / ctas
        d.box(centre - 36, 228, 72, 28, VIOLET, "partial", 11)
        d.arrow((centre, 256), (left + (first + last + 1) / 2 * width / ctas + (n - (first + last) / 2) * 18, 282))
    centre = left + (first + last + 1) / 2 * width / ctas
    d.box(centre - 190, 284, 380, 30, GREY, "the combine kernel adds the partials in the order of their keys", 10)
    return d.svg()


ALL = {"tiles": tiles, "forward_pipeline": forward_pipeline, "backward": backward, "decode": decode}
