# SPDX-License-Identifier: Apache-2.0
"""From measured rows to what people read: ratios, geometric means, the table, the comparison with an earlier run."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from pathlib import Path

from . import cases

# Figures of others, in TFLOP/s or microseconds. Forward and backward rows come from the direct comparison with FA3, of which the guides draw pictures.
PEERS = json.loads((Path(__file__).resolve().parents[3] / "docs" / "data" / "peers.json").read_text())
PUBLISHED = {**json.loads((Path(__file__).parent / "published.json").read_text())["rows"], **PEERS["rows"]}
RATIOS = ("fa2", "cudnn", "fa3", "fa4", "flashmla", "plain", "same", "flex", "read", "before")  # in row["ratios"]: how many times faster ours is


def add_ratios(row):
    """row["ms"] holds milliseconds by contender, "plain" among them for rows that are compared with our own plain kernel."""
    ours = row["ms"]["ours"]
    row["tflops"] = {name: row["flops"] / ms / 1e9 for name, ms in row["ms"].items()}
    row["ratios"] = {name: ms / ours for name, ms in row["ms"].items() if name != "ours"}
    published = PUBLISHED.get(f"{row['section']}: {row['name']}", {})
    if "fa3" in published and "cudnn" in published and "cudnn" in row["ratios"]:
        row["ratios"]["fa3"] = row["ratios"]["cudnn"] * published["cudnn"] / published["fa3"]
    elif "fa3" in published and "cudnn" not in published:
        row["ratios"]["fa3"] = row["tflops"]["ours"] / published["fa3"]  # another run's clock: a lead, no more
    for name in ("fa3", "cudnn"):
        if f"{name}_us" in published:
            row["ratios"].setdefault(name, published[f"{name}_us"] / 1e3 / ours)
    return row


def to_json(data):
    """A row a line, without what add_ratios() makes of it."""
    rows = [json.dumps({key: value for key, value in row.items() if key not in ("tflops", "ratios")}) for row in data["rows"]]
    head = json.dumps({key: value for key, value in data.items() if key != "rows"}, indent=1)
    return head[: head.rindex("\n}")] + ',\n "rows": [\n  ' + ",\n  ".join(rows) + "\n ]\n}\n"


def geomean(values):
    values = list(values)
    return math.exp(sum(map(math.log, values)) / len(values)) if values else float("nan")


def geomeans(rows):
    """{(section, direction, part): {ratio: (geometric mean, smallest, count)}}; a part is a head_dim or an option, "" all."""
    groups = defaultdict(lambda: defaultdict(list))
    for row in rows:
        part = row["option"] or f"D{row['head_dim']}"
        for name, ratio in row["ratios"].items():
            for key in ("", part):
                groups[row["section"], row["direction"], key][name].append(ratio)
    return {
        key: {name: (geomean(values), min(values), len(values)) for name, values in ratios.items()}
        for key, ratios in groups.items()
    }


def unevenness(rows):
    """Lines that compare packed sequences of random lengths with those of one length."""
    lines = []
    for row in rows:
        if row.get("seed"):
            lengths, tokens = row["lengths"], sum(row["lengths"])
            equal = next((other for other in rows if other["section"] == row["section"] and not other.get("seed") and
                          other["direction"] == row["direction"] and other["head_dim"] == row["head_dim"] and
                          other["causal"] == row["causal"] and len(other.get("lengths", ())) == len(lengths) and
                          sum(other["lengths"]) == tokens and len(set(other["lengths"])) == 1), None)
            if equal is not None:
                ratio = row["tflops"]["ours"] / equal["tflops"]["ours"]
                lines.append(f"  {row['name']:44s} {ratio:.3f} of the TFLOP/s of {equal['name']}")
    return lines


def cell(value, form="{:.2f}"):
    return "-" if value is None else form.format(value)


HEADINGS = ("ours us", "TFLOP/s", "FA2", "cuDNN", "x FA2", "x cuDNN", "x FA3", "x FA4", "x FlashMLA", "x plain", "x same", "x flex", "x read", "x before")


def columns(row):
    speed, ratios = row["tflops"], row["ratios"]
    values = [cell(row["ms"]["ours"] * 1e3, "{:.1f}")]
    values += [cell(speed.get(name), "{:.0f}") for name in ("ours", "fa2", "cudnn")]
    return values + [cell(ratios.get(name)) for name in RATIOS]


def line(row):
    notes = [row["kernel"]]
    if "gbytes" in row:
        notes.append(f"{row['gbytes'] / 1e3:.2f} TB/s")
    most = 0.15 if row["option"] == cases.FP8 else 0.02  # operands of e4m3 are themselves 3 % off those of bf16
    if row.get("error", 0) > most or math.isnan(row.get("error", 0)):
        notes.append(f"WRONG: relative difference {row['error']:.1e}")
    return f"{row['name']:44s}" + "".join(f"{value:>11s}" for value in columns(row)) + "  " + ", ".join(notes)


def heading(section):
    return f"\n{section:44s}" + "".join(f"{text:>11s}" for text in HEADINGS)


def summary(rows, host):
    lines = ["\ngeometric mean (smallest, rows) of how many times faster ours is"]
    groups = geomeans(rows)
    parts = Counter((section, direction) for section, direction, part in groups if part)
    for (section, direction, part), ratios in groups.items():
        if part and parts[section, direction] == 1:
            continue  # the same as the line of all
        text = ", ".join(f"{name} {mean:.3f} ({least:.2f}, {count})" for name, (mean, least, count) in sorted(ratios.items()))
        words = [section] + ([direction] if direction != section else []) + ([part] if part else [])
        lines.append(f"  {' '.join(words):30s} {text}")
    slower = [f"  {row['section'] + ': ' + row['name']:54s} {row['ratios']['before']:.3f}" for row in rows if row["ratios"].get("before", 1) < 0.99]
    if any("before" in row["ratios"] for row in rows):
        lines.append(f"against the library before: geometric mean {geomean(row['ratios']['before'] for row in rows if 'before' in row['ratios']):.4f}, "
                     f"{len(slower)} rows below 0.99")
        lines += slower
    uneven = unevenness(rows)
    if uneven:
        lines += ["random lengths against as many equal ones", *uneven]
    if host:
        lines.append("host time of one call, us: " + ", ".join(f"{name} {us:.2f}" for name, us in host.items()))
    return "\n".join(lines)


def compare(rows, baseline_rows):
    """Lines about rows that moved by more than 3 %, and the geometric mean of all: above 1 is faster than the baseline.

    Clocks differ between runs, so rows are compared by their ratio to cuDNN, else FA2, where both runs have one."""
    earlier = {(row["section"], row["name"]): row for row in baseline_rows}
    lines, gains = ["\nagainst the baseline (above 1 is faster now)"], []
    for row in rows:
        old = earlier.get((row["section"], row["name"]))
        if old is None:
            continue
        scale = 1.0
        for opponent in ("cudnn", "fa2"):
            if opponent in row["ms"] and opponent in old["ms"]:
                scale = row["ms"][opponent] / old["ms"][opponent]
                break
        gain = old["ms"]["ours"] / row["ms"]["ours"] * scale
        gains.append(gain)
        if abs(gain - 1) > 0.03:
            lines.append(f"  {row['section'] + ': ' + row['name']:54s} {gain:.3f}")
    lines.append(f"  geometric mean of {len(gains)} rows: {geomean(gains):.3f}")
    return "\n".join(lines)
