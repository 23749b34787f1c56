#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What of the GPU benchmark needs no GPU: arguments, the grid, the table, the picture and the guides' table, from a recorded run."""
import contextlib
import copy
import dataclasses
import io
import json
import sys
import types
import unittest
import unittest.mock
import xml.etree.ElementTree as xml
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT / "docs")]
import bench_table  # noqa: E402
import fa_bench_gpu  # noqa: E402
import pictures  # noqa: E402
from gpu import cases, plot, report  # noqa: E402

RECORDED = HERE / "gpu" / "recorded.json"


def output_of(*arguments):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        fa_bench_gpu.main([str(argument) for argument in arguments])
    return out.getvalue()


def recorded():
    data = json.loads(RECORDED.read_text())
    data["rows"] = [report.add_ratios(row) for row in data["rows"]]
    return data


class Turns(unittest.TestCase):
    def test_everyone_comes_behind_every_other_one(self):
        with unittest.mock.patch.dict(sys.modules, torch=types.ModuleType("torch")):
            from gpu import timing
        for count in range(2, 5):
            names = list("abcd"[:count])
            rounds = [timing.turns(names, number) for number in range(timing.ROUNDS)]
            self.assertTrue(all(sorted(order) == names for order in rounds))
            row = [name for order in rounds for name in order]
            behind = [sum(pair == (a, b) for pair in zip(row, row[1:])) for a in names for b in names if a != b]
            self.assertLessEqual(max(behind), 2 * min(behind) + 1)


class Before(unittest.TestCase):
    def test_rows_slower_than_the_library_before_are_named(self):
        rows = recorded()["rows"][:3]
        for row, before in zip(rows, (1.0, 1.05, 0.9)):
            row["ms"]["before"] = row["ms"]["ours"] * before
            report.add_ratios(row)
        text = report.summary(rows, {})
        self.assertIn("against the library before: geometric mean 0.9813, 1 rows below 0.99", text)
        self.assertIn(rows[2]["name"], text[text.index("against the library before"):])
        self.assertNotIn(rows[1]["name"], text[text.index("against the library before"):])


class Grid(unittest.TestCase):
    def test_names_tell_rows_apart(self):
        for quick in (False, True):
            names = [(case.section, case.name) for case in cases.all_cases(cases.SECTIONS, quick)]
            self.assertEqual(len(names), len(set(names)))

    def test_published_rows_are_rows_of_the_grid(self):
        names = {f"{case.section}: {case.name}" for case in cases.all_cases(cases.SECTIONS, False)}
        self.assertEqual(set(report.PUBLISHED) - names, set())

    def test_flops(self):
        full, causal = (cases.square("forward", "forward", 128, mask, 4096) for mask in (False, True))
        self.assertEqual(full.flops, 4 * 4 * 16 * 4096 ** 2 * 128)  # batch 4, 16 heads
        self.assertEqual(causal.flops * 2, full.flops)
        self.assertEqual(cases.square("backward", "backward", 128, False, 4096).flops, 2.5 * full.flops)
        packed = cases.Case("varlen", "forward", 64, False, 200, 200, 1, 2, 2, lengths=(100, 200))
        self.assertEqual(packed.flops, 4 * 2 * 64 * (100 ** 2 + 200 ** 2))

    def test_pairs_of_windows_and_first_tokens(self):
        for seqlen, reach, first in ((1, 0, 0), (7, 2, 0), (20, 5, 3), (20, 5, 6), (9, 30, 2)):
            pairs = sum(abs(i - j) <= reach or min(i, j) < first for i in range(seqlen) for j in range(seqlen))
            self.assertEqual(cases.window_pairs(seqlen, reach, first), pairs)

    def test_flops_of_score_functions_that_mask(self):
        def flops(section, option):
            return cases.square(section, "forward", 128, False, 16384, option=option).flops

        dense = flops("forward", "")
        self.assertEqual(flops("score", "score prefix"), flops("masks", "prefix"))
        self.assertEqual(flops("score", "score logn"), dense)
        window, image = 2 * cases.GLOBAL_WINDOW + 1, (2 * cases.NEIGHBOURS + 1) ** 2  # of a pair in the middle
        self.assertAlmostEqual(flops("score", "score globals") / dense, window / 16384, delta=0.03 * window / 16384)
        self.assertAlmostEqual(flops("score", "score natten") / dense, image / 16384, delta=0.06 * image / 16384)

    def test_every_score_function_has_a_text_and_rows(self):
        with unittest.mock.patch.dict(sys.modules, torch=types.ModuleType("torch")):
            from gpu import scores
        self.assertEqual({f"score {name}" for name in scores.TEXTS}, set(cases.SCORES))
        for quick in (False, True):
            for direction in ("forward", "backward"):
                rows = {case.option for case in cases.score(quick) if case.direction == direction}
                self.assertEqual(rows, set(cases.SCORES))

    def test_random_lengths_have_an_equal_row_beside_them(self):
        rows = cases.varlen(False)
        random_rows = [row for row in rows if row.seed]
        self.assertEqual(len(random_rows), 24)
        for row in random_rows:
            self.assertEqual((len(row.lengths), sum(row.lengths)), (64, 64 * 1024))
            self.assertTrue(1 <= min(row.lengths) and max(row.lengths) < 2048)
        self.assertNotEqual(cases.random_lengths(1), cases.random_lengths(2))
        measured = [report.add_ratios(dict(dataclasses.asdict(row), name=row.name, flops=row.flops, kernel="",
                                           ms={"ours": row.flops / (0.9 if row.seed else 1.0)})) for row in rows]
        lines = report.unevenness(measured)
        self.assertEqual(len(lines), 24)
        self.assertTrue(all(" 0.900 of " in line for line in lines))

    def test_decode_reads_keys_and_values_once(self):
        rows = cases.decode(False)
        self.assertEqual({row.page for row in rows}, {0, 1, 16, 64, 256})
        row = next(row for row in rows if row.batch == 32 and row.page == 16)
        self.assertEqual(row.key_bytes, 2 * 2 * 32 * 8192 * 8 * 128)
        self.assertEqual(row.pages * row.page, row.seqlen_k)
        self.assertIn("page16", row.name)
        for option in (cases.INVARIANT, cases.LENGTHS):
            with_option = [row for row in rows if row.option == option]
            self.assertTrue(with_option and all(dataclasses.replace(row, option="") in rows for row in with_option), option)


class Arguments(unittest.TestCase):
    def test_filters_narrow_the_list(self):
        everything, some = output_of("--list").splitlines(), output_of("--list", "--filter", "D64", "--filter", "S512 ").splitlines()
        self.assertTrue(some and set(some) < set(everything))
        self.assertTrue(all("D64" in name and name.endswith("S512") for name in some))
        self.assertEqual({name.split(":")[0] for name in output_of("--list", "--sections", "short,decode").splitlines()},
                         {"short", "decode"})

    def test_unknown_section_is_refused(self):
        with self.assertRaises(SystemExit) as refusal:
            output_of("--sections", "forward,sideways")
        self.assertNotEqual(refusal.exception.code, 0)


class Report(unittest.TestCase):
    def test_ratios(self):
        row = next(row for row in recorded()["rows"] if row["name"] == "forward D64 full S512" and row["section"] == "forward")
        self.assertAlmostEqual(row["ratios"]["fa2"], row["ms"]["fa2"] / row["ms"]["ours"])
        self.assertAlmostEqual(row["tflops"]["ours"], row["flops"] / row["ms"]["ours"] / 1e9)
        published = report.PUBLISHED["forward: forward D64 full S512"]
        self.assertAlmostEqual(row["ratios"]["fa3"], row["ratios"]["cudnn"] * published["cudnn"] / published["fa3"])

    def test_published_times_of_decoding(self):
        case = next(case for case in cases.decode(False) if case.batch == 1 and case.page == 16)
        row = report.add_ratios(dict(dataclasses.asdict(case), name=case.name, flops=case.flops, kernel="", gbytes=1.0,
                                     ms={"ours": 0.0032, "read": 0.0016}))
        published = report.PUBLISHED[f"decode: {case.name}"]
        self.assertAlmostEqual(row["ratios"]["cudnn"], published["cudnn_us"] / 3.2)
        self.assertAlmostEqual(row["ratios"]["read"], 0.5)
        self.assertEqual(len(report.columns(row)), len(report.HEADINGS))

    def test_json_of_a_run_is_that_run(self):
        data = json.loads(report.to_json(recorded()))
        data["rows"] = [report.add_ratios(row) for row in data["rows"]]
        self.assertEqual(data, recorded())

    def test_replay_prints_every_row_and_means(self):
        text = output_of("--replay", RECORDED)
        for row in recorded()["rows"]:
            self.assertIn(row["name"], text)
        self.assertIn("geometric mean", text)
        self.assertIn("fa_forward 4.27", text)

    def test_means_of_score_functions_by_opponent_and_direction(self):
        rows = []
        for case in cases.score(True):
            slower = {"flex": 2.0, "same": 0.5, **({"fa4": 1.5} if case.direction == "forward" else {})}
            rows.append(report.add_ratios(dict(dataclasses.asdict(case), name=case.name, flops=case.flops, kernel="",
                                               ms={"ours": 1.0, **slower})))
        lines = report.summary(rows, {}).splitlines()
        forward, backward = (next(line for line in lines if line.split()[:3] == words)  # of all functions together
                             for words in (["score", "forward", "fa4"], ["score", "backward", "flex"]))
        for text in ("fa4 1.500", "flex 2.000", "same 0.500"):
            self.assertIn(text, forward)
        self.assertNotIn("fa4", backward)
        self.assertIn("flex 2.000", backward)

    def test_wrong_results_are_called_wrong(self):
        row = recorded()["rows"][0]
        self.assertNotIn("WRONG", report.line(row))
        for error in (0.5, float("nan")):
            self.assertIn("WRONG", report.line(dict(row, error=error)))

    def test_baseline_follows_ratios_not_clocks(self):
        now, before = recorded()["rows"], recorded()["rows"]
        for row in before:  # a card of half the clock
            row["ms"] = {name: 2 * ms for name, ms in row["ms"].items()}
        alone = [row for row in now if not {"cudnn", "fa2"} & set(row["ms"])]
        together = [row for row in now if row not in alone]
        self.assertIn("geometric mean of %d rows: 1.000" % len(together), report.compare(together, before))
        slower = copy.deepcopy(together)
        slower[0]["ms"]["ours"] *= 2
        self.assertIn(f"{slower[0]['section']}: {slower[0]['name']}", report.compare(slower, before))


class Picture(unittest.TestCase):
    def test_svg_has_a_line_for_every_contender_of_every_panel(self):
        data = recorded()
        root = xml.fromstring(plot.svg(data))
        panels = {(row["direction"], row["causal"], row["head_dim"]) for row in data["rows"] if row["section"] in ("forward", "backward")}
        lines = [element for element in root if element.tag.endswith("polyline")]
        self.assertEqual(len(lines), len(panels) * len(plot.CONTENDERS))
        points = [float(x) for element in lines for pair in element.get("points").split() for x in pair.split(",")]
        self.assertTrue(points and min(points) > 0 and max(points) < float(root.get("height")))

    def test_memory_has_a_line_for_every_contender(self):
        rows = [{"seqlen": n, "tensors": 32768 * n, "bytes": {"ours": 8192 * n, "unfused": 64 * n * n}} for n in (1024, 2048, 4096)]
        root = xml.fromstring(plot.memory_svg({"device": "a GPU", "memory": rows}))
        heights = [[float(pair.split(",")[1]) for pair in element.get("points").split()] for element in root
                   if element.tag.endswith("polyline") and element.get("points")]
        self.assertEqual(sorted(map(len, heights)), [3, 3, 3])
        self.assertTrue(all(ys == sorted(ys, reverse=True) for ys in heights))  # more rows, more memory: further up

    def test_nothing_to_draw_is_an_error(self):
        for draw in (plot.svg, plot.memory_svg):
            with self.assertRaises(ValueError):
                draw({"device": "none", "rows": []})


class Table(unittest.TestCase):
    @staticmethod
    def page(*markers):
        return "before\n" + "".join(f"{each.begin}\nold\n{each.end}\n" for each in markers) + "after\n"

    def test_tables_are_written_between_their_markers(self):
        cpu = json.loads((ROOT / "docs" / "data" / "cpu.json").read_text())
        gpu = dict(recorded(), torch="2.11")
        measured = bench_table.measured(report.PEERS, gpu, cpu, self.page(bench_table.PEERS, bench_table.GPU, bench_table.CPU))
        readme = bench_table.readme(report.PEERS, gpu, cpu, self.page(bench_table.HEADLINE, bench_table.SPEED))
        for text in (measured, readme):
            self.assertTrue(text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text)
            self.assertIn("NVIDIA H200", text)
        self.assertEqual(measured.count("| forward, head_dim 128, causal |"), 2)
        self.assertIn("| forward, head_dim 128 |", readme)

    def test_direct_comparison_is_of_rows_of_the_grid(self):
        shapes = bench_table.by_shape(report.PEERS)
        self.assertEqual(len(shapes), 12)
        self.assertTrue(all(sorted(rows) == [512, 1024, 2048, 4096, 8192, 16384] for rows in shapes.values()))
        row = shapes["forward", 128, "causal"][16384]
        self.assertEqual((row["ours"], row["fa3"], row["cudnn"]), (779, 705, 556))

    def test_means_are_geometric(self):
        self.assertAlmostEqual(bench_table.mean([0.5, 2.0]), 1.0)


if __name__ == "__main__":
    unittest.main()
