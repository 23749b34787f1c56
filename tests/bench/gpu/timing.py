# SPDX-License-Identifier: Apache-2.0
"""Times several contenders, interleaved: every round runs a burst of each contender, and the result is the median of the rounds.

A GPU runs faster in bursts of a few milliseconds than in long loops, and the load of a neighbouring GPU changes its clock. Contenders
are therefore comparable only if they are interleaved. The contender that runs just before matters, too, by 5 % and more if it leaves
the GPU cool, so every round has another order."""

from __future__ import annotations

import statistics
import time
from typing import Callable, Dict, List

import torch

ROUNDS = 9
GRAPH_CALLS = 20


LEAD_CYCLES = 4_000_000  # 2 ms and more


def burst(call: Callable[[], object], calls: int, lead: bool = False) -> float:
    """Milliseconds a call, `calls` of them in a row, on the device's clock. `lead`: the device waits first, so that the host is ahead of it."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if lead:
        torch.cuda._sleep(LEAD_CYCLES)
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / calls


def turns(names: List[str], number: int) -> List[str]:
    """The order of a round: everyone comes behind every other one about equally often."""
    steps = [(k + 1) // 2 * (1 if k % 2 else -1) for k in range(len(names))]  # 0, 1, -1, 2, -2, ...
    order = [names[(step + number // 2) % len(names)] for step in steps]
    return order[::-1] if number % 2 else order


def side_by_side(contenders: Dict[str, Callable[[], object]], budget_s: float, per_call: int = 1, lead: bool = False) -> Dict[str, float]:
    """Median milliseconds of each contender within about `budget_s` seconds; a call stands for `per_call` of them. `lead`: as in burst(), for
    contenders whose calls cost much host time."""
    cost = {name: (burst(call, 1), burst(call, 2, lead))[1] for name, call in contenders.items()}  # the first warms up
    per_round = budget_s * 1e3 / ROUNDS / max(len(contenders), 1)
    calls = {name: max(1, min(200, int(per_round / ms))) for name, ms in cost.items()}
    times: Dict[str, list] = {name: [] for name in contenders}
    for number in range(ROUNDS):
        for name in turns(list(contenders), number):
            times[name].append(burst(contenders[name], calls[name], lead) / per_call)
    return {name: statistics.median(values) for name, values in times.items()}


def graph_of(calls) -> Callable[[], object]:
    """A replay of these calls, captured once."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # inputs may still be on their way
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    return graph.replay


def host_us(call: Callable[[], object], calls: int = 100, rounds: int = 20) -> float:
    """Microseconds of host time a call; few enough calls in a row that the queue to the device never fills."""
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - begin) / calls)
    torch.cuda.synchronize()
    return statistics.median(times) * 1e6
