"""One block: every prompt once, a fixed number at a time, and a look at whether the client keeps up."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import aiohttp

from sglang_bw.experiment import client
from sglang_bw.experiment.client import Sampling
from sglang_bw.experiment.prompts import Prompt
from sglang_bw.experiment.quantiles import Quantiles, quantiles
from sglang_bw.ledger.record import RequestRow

TICK_S = 0.01
TOO_LATE_S = 0.001
TOO_BUSY = 0.9
_LOADS_EVERY_S = 0.5

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Measured:
    """What a block brought.

    :ivar rows: in the order of the prompts.
    :ivar seconds: from the first request to the end of the last.
    :ivar spread_s: quantiles of every gap between arrivals, seconds.
    :ivar lag_s: median lateness of a timer of this event loop: what the client adds to every token.
    :ivar cpu: share of one core that the client used.
    :ivar kv_use: largest share of the KV pool that the server reported.
    """

    rows: tuple[RequestRow, ...]
    seconds: float
    spread_s: Quantiles | None
    lag_s: float
    cpu: float
    kv_use: float | None


def is_slow(lag_s: float, cpu: float) -> bool:
    """Tell whether the client, and not the server, may have set the speed."""
    return lag_s > TOO_LATE_S or cpu > TOO_BUSY


def run_block(
    url: str,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    concurrency: int,
    *,
    api_key: str | None = None,
    on_done: Progress | None = None,
) -> Measured:
    """Ask every prompt once, in order, with ``concurrency`` requests open.

    :param on_done: called with the number of answered requests.
    :raises StreamFailedError: a request failed; the others are given up.
    :raises PromptsError: a prompt does not fit the context.
    """
    return asyncio.run(_block(url, prompts, sampling, concurrency, api_key, on_done))


async def _block(
    url: str,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    concurrency: int,
    api_key: str | None,
    on_done: Progress | None,
) -> Measured:
    rows: dict[int, RequestRow] = {}
    gaps: list[float] = []
    waiting = iter(enumerate(prompts))
    async with client.connect(sampling.timeout_s, api_key) as session:
        watch = _Watch(session, url)
        began, cpu = time.perf_counter(), time.process_time()

        async def work() -> None:
            for number, prompt in waiting:
                rows[number], found = await client.ask(session, url, prompt, sampling, began)
                gaps.extend(found)
                if on_done:
                    on_done(len(rows))

        try:
            async with asyncio.TaskGroup() as group:
                watchers = [group.create_task(watch.ticks()), group.create_task(watch.loads())]
                workers = [group.create_task(work()) for _ in range(min(concurrency, len(prompts)))]
                await asyncio.wait(workers, return_when=asyncio.FIRST_EXCEPTION)
                for task in watchers:
                    task.cancel()
        except ExceptionGroup as group_error:  # the first failure ends the block; the rest are its consequences
            raise group_error.exceptions[0] from None
        seconds, used = time.perf_counter() - began, time.process_time() - cpu
    return Measured(
        rows=tuple(rows[number] for number in range(len(prompts))),
        seconds=seconds,
        spread_s=quantiles(gaps) if gaps else None,
        lag_s=statistics.median(watch.late) if watch.late else 0.0,
        cpu=used / seconds,
        kv_use=max(watch.kv_use, default=None),
    )


class _Watch:
    """What goes on beside the requests: the loop's own lateness, and the KV pool."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.session = session
        self.url = url
        self.late: list[float] = []
        self.kv_use: list[float] = []

    async def ticks(self) -> None:
        while True:
            due = time.perf_counter() + TICK_S
            await asyncio.sleep(TICK_S)
            self.late.append(max(0.0, time.perf_counter() - due))

    async def loads(self) -> None:
        """Ask the engine for its load; one that does not know the question is asked once."""
        while True:
            try:
                async with self.session.get(f"{self.url}/v1/loads") as response:
                    answer = await response.json() if response.status == 200 else None
                ranks = answer["loads"] if answer else []
                self.kv_use += [float(rank["token_usage"]) for rank in ranks]
            except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError):
                return
            if not ranks:
                return
            await asyncio.sleep(_LOADS_EVERY_S)
