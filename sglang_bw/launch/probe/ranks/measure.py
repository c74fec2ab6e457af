"""Is the sum right, and how long does it take: eagerly and from a CUDA graph."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sglang_bw.launch.probe.ranks.communicators import Ranks, Way

# All-reduces between two readings of the clock: a decode step of a small model has about as many.
CALLS = 32
SAMPLES = 25
WARM_UP = 5
# Whole numbers this small add up exactly in bf16 over 16 ranks, in any order.
_LARGEST = 8
_AT_ONCE = 100
# Of all ranks' numbers at once: a quarter of a gibibyte before they are rounded to bf16.
_ELEMENTS = 1 << 26

Runner = Callable[[Any], Any]


class Check:
    """Compares sums with those of the reference and with the exact ones."""

    def __init__(self, ranks: Ranks, reference: Way, shape: tuple[int, int]) -> None:
        import torch

        self.ranks, self.reference, self.shape = ranks, reference, shape
        self.dice = torch.Generator(device=ranks.device)

    def wrong(self, reduce: Runner, repetitions: int, tell: Callable[[int], None]) -> int:
        """Return in how many of the repetitions, on any rank, an element was not the reference's.

        Every repetition has numbers of its own, on every rank others.

        :param tell: called from time to time with the number of repetitions that are done.
        :raises RuntimeError: the reference itself is wrong.
        """
        import torch
        import torch.distributed as dist

        bad = torch.zeros(2, dtype=torch.int64, device=self.ranks.device)
        at_once = self._at_once()
        for done in range(0, repetitions, at_once):
            inputs = self._numbers(done, min(at_once, repetitions - done))
            exact = inputs.float().sum(0).to(torch.bfloat16)
            own = inputs[self.ranks.rank]
            known, found = own.clone(), torch.empty_like(own)
            for number in range(len(own)):
                known[number] = self.reference.reduce(known[number])
                found[number] = reduce(own[number].clone())
            bad[0] += (found != known).flatten(1).any(1).sum()
            bad[1] += (known != exact).flatten(1).any(1).sum()
            self._wait()
            tell(done + len(own))
        counts = bad.cpu()
        dist.all_reduce(counts, op=dist.ReduceOp.MAX, group=self.ranks.host_group)
        if counts[1]:
            raise RuntimeError(f"the reference's sum was not the exact one in {int(counts[1])} of {repetitions}")
        return int(counts[0])

    def _at_once(self) -> int:
        """Return how many repetitions are drawn and compared together, so that neither costs more than the sums."""
        return max(1, min(_AT_ONCE, _ELEMENTS // (self.ranks.world * math.prod(self.shape))))

    def _numbers(self, seed: int, count: int) -> Any:
        """Return whole numbers of all ranks; shape (world, count, rows, hidden), the same on every rank."""
        import torch

        self.dice.manual_seed(seed)
        shape = (self.ranks.world, count, *self.shape)
        whole = torch.randint(
            -_LARGEST, _LARGEST + 1, shape, generator=self.dice, device=self.ranks.device, dtype=torch.int32
        )
        return whole.to(torch.bfloat16)

    def _wait(self) -> None:
        import torch

        if self.ranks.device.type == "cuda":
            torch.cuda.synchronize(self.ranks.device)


@contextmanager
def captured(way: Way, shape: tuple[int, int], device: Any, calls: int) -> Iterator[tuple[Any, Any, Any]]:
    """Capture ``calls`` all-reduces into a graph; gives the graph, its input and the result of the last call."""
    import torch

    source = torch.zeros(shape, dtype=torch.bfloat16, device=device)
    work = torch.zeros_like(source)
    stream = torch.cuda.Stream(device=device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(2):
            way.reduce(work)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream), way.capturing(), torch.cuda.graph(graph, stream=stream):
        work.copy_(source)
        for _ in range(calls):
            result = way.reduce(work)
    yield graph, source, result
    torch.cuda.synchronize(device)
    del graph


def replayed(graph: Any, source: Any, result: Any) -> Runner:
    """Return an all-reduce that replays a graph of one call."""

    def reduce(tensor: Any) -> Any:
        source.copy_(tensor)
        graph.replay()
        return result

    return reduce


def seconds(ranks: Ranks, run: Callable[[], None], calls: int) -> tuple[float, float]:
    """Return seconds of one call: the median of the samples, and the 90th percentile, both of the slowest rank.

    :param run: does ``calls`` all-reduces.
    """
    import torch
    import torch.distributed as dist

    dist.barrier(group=ranks.host_group)
    samples = _on_gpu(ranks, run) if ranks.device.type == "cuda" else _on_cpu(run)
    own = [statistics.median(samples) / calls, statistics.quantiles(samples, n=10)[-1] / calls]
    slowest = torch.tensor(own, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=ranks.host_group)
    return float(slowest[0]), float(slowest[1])


def _on_gpu(ranks: Ranks, run: Callable[[], None]) -> list[float]:
    import torch

    marks = []
    for number in range(WARM_UP + SAMPLES):
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        run()
        after.record()
        if number >= WARM_UP:
            marks.append((before, after))
    torch.cuda.synchronize(ranks.device)
    return [before.elapsed_time(after) * 1e-3 for before, after in marks]


def _on_cpu(run: Callable[[], None]) -> list[float]:
    samples = []
    for number in range(WARM_UP + SAMPLES):
        began = time.perf_counter()
        run()
        if number >= WARM_UP:
            samples.append(time.perf_counter() - began)
    return samples
