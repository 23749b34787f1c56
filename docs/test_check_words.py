#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""check_words.py finds a private word of every rule, lets plain English pass, and follows its list of exceptions."""
import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import check_words  # noqa: E402

PRIVATE = {
    "copy engine": "the copy engine brings K", "slab": "kSlabColumns", "block of threads": "blocks of threads", "multiprocessor": "a multiprocessor",
    "those who": "the warp that fetches", "ring": "a ring of three", "place": "two places for Q", "chunk": "chunk_rows", "walk": "it walks over keys",
    "turn": "groups take turns", "weigh": "weighKeys()", "lag": "the late maximum", "factor": "factors of rows", "bytes": "over bytes, too",
    "shares": "even shares", "items": "a line of work", "pieces": "equal pieces", "parts": "adds parts", "sums": "a second launch",
    "abreast": "abreast_log2", "rows by keys": "keys_by_rows.cuh", "mend": "mend()", "landing": "shared_landing()", "blind": "a blind tile",
    "told": "what it is told", "chained": "chained launches", "stays": "blocks that stay", "sections": "heads_per_section", "asks for": "asked of the cache",
    "one a": "one a sequence", "products": "products_begin()", "stamps": "stamps",
    "cuda: partition": "range_begin", "cuda: partial": "add_parts()", "cuda: stage": "slot_of()", "cuda: turn": "await_turn()", "cuda: section": "section_of()",
    "cuda: factor": "only_factor()", "cuda: epilogue": "shared_closing()", "cuda: NaN-safe": "add_exactly()", "cuda: barrier": "heard()",
    "cuda: persistent": "staying()",
}
PLAIN = ("The producer warp loads K into a pipeline stage.", "a string, during, several springs", "chunked prefill; prefill chunks", "a nested turnaround",
         "size in bytes, 16 bytes", "it takes place in the epilogue", "counterparts", "masked", "one attention call per sequence", "Return the status.", "a random walk", "printed in turn",
         "two versions installed side by side", "p = 0.999 a row keeps one key", "too many parts", "exact_q.chunks(DIM)", "device.multiprocessors", "streaming multiprocessors")
PLAIN_CUDA = ("The four lanes that share a row", "using KeyRange = RangeOf<int32_t>;", "tiles with a key in the range of keys", "out is rescaled by this factor",
              "rescaling factors", "float factor = 1.f;", "the parts that kernels are made of", "int num_parts;", "q.slot", "KvPlace place(int page)", "in place",
              "turns scores into exponents", "applied in turn", "its sum turns out too large", "Q stays in registers", "P stays below it", "exactly one warp",
              "the caller takes care of it", "can be told from P = 0", "close to zero",
              "that all kernels for sm_90a share", "the factors of out", "no gradient is asked for", "KvPlace place_of(int key)")


class Words(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        (self.root / "src/cuda").mkdir(parents=True)

    def found(self, name, text, *allowances):
        (self.root / name).write_text(text + "\n")
        return [rule for _, _, rule, _ in check_words.found(self.root, [name], [check_words.Allowance(line) for line in allowances])]

    def test_every_rule_finds_its_word(self):
        self.assertEqual(set(PRIVATE), set(check_words.RULES))
        for rule, text in PRIVATE.items():
            self.assertIn(rule, self.found("src/cuda/one.cuh", text), text)

    def test_words_of_the_kernels_are_plain_elsewhere(self):
        self.assertEqual(self.found("guide.md", "Work items of all parts, in slots, asked for and closed."), ["items"])

    def test_plain_english_passes(self):
        for text in PLAIN:
            self.assertEqual(self.found("guide.md", text), [], text)

    def test_plain_english_passes_in_the_kernels(self):
        for text in PLAIN_CUDA:
            self.assertEqual(self.found("src/cuda/one.cuh", text), [], text)

    def test_exceptions_are_for_their_file_rule_and_text(self):
        text = "the walk of a tree"
        for line, rules in (("*.md | walk | a tree's", []), ("*.md | * | tree | a tree's", []), ("*.md | slab | no", ["walk"]), ("*.h | walk | no", ["walk"]),
                            ("*.md | walk | keys | no", ["walk"])):
            self.assertEqual(self.found("guide.md", text, line), rules, line)
        for line in ("*.md | walk", "*.md | wlak | a reason", "*.md | walk | "):
            with self.assertRaises(ValueError):
                check_words.Allowance(line)

    def test_a_path_that_is_not_there_is_an_error(self):
        with self.assertRaises(FileNotFoundError):
            list(check_words.found(self.root, ["nowhere"], []))


if __name__ == "__main__":
    unittest.main()
