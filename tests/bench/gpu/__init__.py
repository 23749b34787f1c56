# SPDX-License-Identifier: Apache-2.0
"""The parts of fa_bench_gpu.py: what is measured (cases), by what (library, opponents), how (timing), and what becomes of it
(report, plot). Only library and opponents need PyTorch and a GPU."""
