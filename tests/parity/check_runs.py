#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A run of parity_test that tests nothing is not a pass, and every suite that runs on backends has a ctest group.

usage: check_runs.py PARITY_TEST GROUP...
"""
import os
import re
import subprocess
import sys
import unittest

PROGRAM, GROUPS = sys.argv[1], sys.argv[2:]
SKIPPED = 77


def run(*arguments, backend=None, **settings):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FA_TEST_")}
    environment.update(settings)
    if backend is not None:
        environment["FA_TEST_BACKEND"] = backend
    done = subprocess.run([PROGRAM, *arguments], env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


class Runs(unittest.TestCase):
    def test_backend_that_nobody_has(self):
        status, text = run("--gtest_filter=*Replay*", backend="cudda")
        self.assertEqual(status, 1, text)
        self.assertIn("FA_TEST_BACKEND=cudda is part of no backend's name", text)

    def test_filter_that_selects_nothing(self):
        status, text = run("--gtest_filter=NoSuchSuite.*")
        self.assertEqual(status, 1, text)
        self.assertIn("no test is selected", text)

    def test_cuda_runs_or_says_skipped(self):
        status, text = run("--gtest_filter=*/Merge.*", backend="cuda")
        passed = re.search(r"\[  PASSED  \] (\d+) test", text)
        if status == SKIPPED:
            self.assertRegex(text, r"cuda: (no GPU|this build has no CUDA kernels)")
            self.assertEqual(passed[1], "0", text)
        else:
            self.assertEqual(status, 0, text)
            self.assertGreater(int(passed[1]), 0, text)

    def test_percent_that_is_no_number(self):
        status, text = run("--gtest_filter=*Random*", FA_TEST_PERCENT="x")
        self.assertEqual(status, 1, text)
        self.assertIn("FA_TEST_PERCENT=x is no positive number", text)

    def test_every_suite_has_a_group(self):
        status, text = run("--gtest_list_tests")
        self.assertEqual(status, 0, text)
        suites = re.findall(r"^\w+/(\w+)\.", text, re.M)
        self.assertGreater(len(suites), 10, text)
        self.assertEqual(set(suites) - set(GROUPS), {"Replay"}, "suites without a group in tests/parity/CMakeLists.txt")
        every = re.findall(r"^(?:\w+/)?(\w+)\.", text, re.M)
        empty = [group for group in GROUPS if not any(suite.startswith(group) for suite in every)]
        self.assertEqual(empty, [], "groups without a suite")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
