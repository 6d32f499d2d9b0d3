"""Loads: closed (so many at once, the next when one ends) and open (at their times, whatever the server does)."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from vidspec_service.bench.serve.exchange import Asker, Outcome, Question

Told = Callable[[int], None]  # answers so far


async def closed_load(
    asker: Asker, questions: Iterable[Question], concurrency: int, told: Told
) -> tuple[list[Outcome], float]:
    """Outcomes in the order in which they ended, and how long it took."""
    began, outcomes, waiting = time.perf_counter(), list[Outcome](), iter(questions)

    async def client() -> None:
        for question in waiting:  # one iterator for all
            outcomes.append(await asker.ask(question, began, time.perf_counter() - began))
            told(len(outcomes))

    async with asyncio.TaskGroup() as clients:
        for _ in range(concurrency):
            clients.create_task(client())
    return outcomes, time.perf_counter() - began


async def open_load(
    asker: Asker, questions: Iterator[Question], due_s: Sequence[float], told: Told
) -> tuple[list[Outcome], float]:
    """One question at each of the times, in seconds since the start; returns when all have ended."""
    began, outcomes = time.perf_counter(), list[Outcome]()

    async def client(question: Question, due: float) -> None:
        outcomes.append(await asker.ask(question, began, due))
        told(len(outcomes))

    async with asyncio.TaskGroup() as clients:
        for due, question in zip(due_s, questions, strict=False):
            await asyncio.sleep(max(began + due - time.perf_counter(), 0))
            clients.create_task(client(question, due))
    return outcomes, time.perf_counter() - began


def poisson_times(
    rate: float, dice: random.Random, *, count: int | None = None, until_s: float | None = None
) -> list[float]:
    """Arrival times of a Poisson process: so many, or all before `until_s`."""
    times, now = list[float](), 0.0
    while count is None or len(times) < count:
        now += dice.expovariate(rate)
        if until_s is not None and now >= until_s:
            break
        times.append(now)
    return times
