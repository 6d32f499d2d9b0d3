"""What a forward and a message cost, each measured alone, and the speed-up that the speed model predicts from it.

Models are timed in child processes, the only ones that import torch.
"""

from __future__ import annotations

import dataclasses
import gc
import socket
import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from statistics import fmean
from threading import Thread, main_thread

import numpy as np

from vidspec_models.loading.spec import ModelSpec
from vidspec_service.bench.common.child import Child, call_in_child
from vidspec_service.bench.common.environment import Placement, target_only_config, threads_of
from vidspec_service.bench.common.samples import Sample
from vidspec_service.bench.speed.activity import ForwardSpan
from vidspec_service.bench.speed.options import Mode
from vidspec_service.engine.config import EngineConfig
from vidspec_service.engine.ipc.channel import Channel, wait_readable
from vidspec_service.engine.ipc.messages import Proposal, Verdict
from vidspec_service.engine.speculation.plan import MIN_GAIN_AUTO, Plan, StepCosts, best_plan
from vidspec_service.errors import ConfigError

_REPEATS = 60
_ROOM = 4  # cache rows after the context, enough for a stride
_TIMEOUT_S = 5.0
_EXCHANGES, _WARM_UP = 2000, 200
_PROPOSAL = Proposal(request_id="bench", epoch=1, start=1, ids=(1,), confidences=(0.5,), step_s=0.001, video_tokens=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardTimes(Placement):
    """One model, timed alone: median seconds of a forward over n rows; includes choosing tokens, as a step does."""

    threads: int
    seconds: dict[int, float]
    token_bytes: int = 0  # keys and values of one position
    stride_s: float | None = None  # seconds per token when the model makes several in one call; None if it cannot
    bandwidth: float | None = None  # bytes/s read and written by copies; of several devices, one reads at a time

    @property
    def token_s(self) -> float:
        """Seconds per token without speculation."""
        return self.seconds[1] if self.stride_s is None else self.stride_s


def time_forwards(
    spec: ModelSpec, threads: int, context: int, rows: tuple[int, ...], *, with_copies: bool = False
) -> ForwardTimes:
    """Time forwards with `context` rows in the cache. `with_copies`: also the bandwidth, the best of several copies."""
    import torch

    from vidspec_models.decoder.kv_cache import KVCache
    from vidspec_models.loading.load_model import load_model
    from vidspec_models.reference.measure import time_copies, time_steps, time_strides

    torch.set_num_threads(threads)
    model = load_model(spec)
    model.use_when_alone(threads)
    context = min(context, model.context_length - max(*rows, _ROOM))
    cache = KVCache(model.decoder.geometry, context + max(*rows, _ROOM))
    forwards = ForwardTimes(
        threads=threads,
        seconds=time_steps(model, cache, context, rows, _REPEATS),
        token_bytes=model.decoder.geometry.bytes_per_token(),
        stride_s=time_strides(model, cache, context),
        **dataclasses.asdict(Placement.of(model)),
    )
    if not with_copies:
        return forwards
    del model, cache  # they may fill the device, and the copies need room
    gc.collect()  # compiling leaves cycles of frames behind that hold the model
    return replace(forwards, bandwidth=time_copies(torch.device(forwards.device.partition(",")[0])))


class BusyDraft:
    """A draft that generates tokens until its process is about to end, as many per call as in the engine."""

    def __init__(self, spec: ModelSpec, threads: int, context: int) -> None:
        import torch

        from vidspec_models.decoder.kv_cache import KVCache
        from vidspec_models.loading.load_model import load_model
        from vidspec_models.request import SamplingParams
        from vidspec_models.sampling import CoupledSampler
        from vidspec_models.video_lm import StepRows
        from vidspec_service.engine.draft.request import MIN_CALL_TOKENS

        torch.set_num_threads(threads)
        model = load_model(spec)
        context = min(context, model.context_length - MIN_CALL_TOKENS)
        cache = KVCache(model.decoder.geometry, context + MIN_CALL_TOKENS)
        rows, greedy = StepRows(cache=cache, ids=[0], position=context), CoupledSampler(SamplingParams())

        def make_tokens() -> None:
            while main_thread().is_alive():  # a daemon thread stopped inside a kernel would abort the process
                cache.length = context
                model.propose([(rows, greedy, [])], MIN_CALL_TOKENS)

        self._thread = Thread(target=make_tokens)
        self._thread.start()

    def is_at_work(self) -> bool:
        """False once an error has ended the thread; the child process has then printed the error."""
        return self._thread.is_alive()


class Echo:
    """The far end of the round trip, in a process of its own: sends a Verdict for every Proposal."""

    def __init__(self, sock: socket.socket) -> None:
        Thread(target=self._answer, args=(Channel(sock),), daemon=True).start()

    def _answer(self, channel: Channel) -> None:
        while True:
            wait_readable([channel], _TIMEOUT_S)
            while (received := channel.receive()) is not None:
                proposal = received[0]
                assert isinstance(proposal, Proposal)
                channel.send(
                    Verdict(request_id=proposal.request_id, start=proposal.start, ids=proposal.ids, max_lead=16)
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedCosts:
    """Forwards of `target` (its threads in a pair, beside a busy draft), `alone` (target, all cores) and `draft`."""

    context: int
    target: ForwardTimes
    alone: ForwardTimes
    draft: ForwardTimes | None = None

    @property
    def cost_ratio(self) -> float | None:
        """c = T_target(1) / T_draft(1)."""
        return self.target.seconds[1] / self.draft.seconds[1] if self.draft is not None else None


def typical_context(samples: Sequence[Sample]) -> int:
    """Cache rows that a forward attends to half-way through an answer of mean length."""
    return round(fmean(sample.prompt_tokens + len(sample.ids) / 2 for sample in samples))


def probe_costs(pair: EngineConfig, context: int, rows: tuple[int, ...], *, with_copies: bool = False) -> ProbedCosts:
    """Time the target's forwards over `rows`, alone and beside a busy draft, and the draft's forward over one row.

    Raises ConfigError. `with_copies`: also measures the bandwidth of the devices of `alone` and `draft`.
    """
    threads, threads_alone = threads_of(pair), threads_of(target_only_config(pair))["target"]
    spec = pair.target.spec("target")
    alone = call_in_child(time_forwards, spec, threads_alone, context, rows, with_copies=with_copies)
    if pair.draft is None or pair.has_ngram_draft:
        return ProbedCosts(context=context, target=alone, alone=alone)
    draft_spec, draft_threads = pair.draft.spec("draft"), threads["draft"]
    with Child(BusyDraft, draft_spec, draft_threads, context) as busy:  # they share caches, memory, maybe a device
        target = call_in_child(time_forwards, spec, threads["target"], context, rows)
        if not busy.call(BusyDraft.is_at_work):
            raise ConfigError("the draft process stopped while the target was timed beside it; its output says why")
    draft = call_in_child(time_forwards, draft_spec, draft_threads, context, (1,), with_copies=with_copies)
    return ProbedCosts(context=context, target=target, alone=alone, draft=draft)


def measure_round_trip(num_exchanges: int = _EXCHANGES) -> dict[str, float]:
    """Seconds from sending a Proposal to receiving a Verdict on the workers' channel; both sides sleep in between."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    times = []
    with closing(Channel(ours)) as channel, theirs, Child(Echo, theirs):
        for _ in range(_WARM_UP + num_exchanges):
            started = time.perf_counter()
            channel.send(_PROPOSAL)
            wait_readable([channel], _TIMEOUT_S)
            if channel.receive() is None:
                raise ConfigError("the far end of the channel did not answer")
            times.append(time.perf_counter() - started)
    p50_s, p99_s = np.percentile(times[_WARM_UP:], (50, 99)).tolist()
    return {"p50_s": p50_s, "p99_s": p99_s, "num_exchanges": num_exchanges}


def fitted_costs(steps: Iterable[tuple[int, float]], draft_s: float, latency_s: float) -> StepCosts:
    """Fit the line base + row * n to steps, each n rows and their seconds, by least squares."""
    of = np.array(list(steps), np.float64)
    base_s, row_s = np.polynomial.polynomial.polyfit(of[:, 0], of[:, 1], 1).tolist()
    return StepCosts(base_s=max(base_s, 1e-6), row_s=max(row_s, 0.0), draft_s=draft_s, latency_s=latency_s)


def costs_alone(mode: Mode, costs: ProbedCosts, latency_s: float) -> StepCosts | None:
    """What the probed forwards and messages cost; None without a draft."""
    if costs.draft is None:
        return None
    target = costs.alone if mode is Mode.SERIAL else costs.target  # in serial, the draft does not run beside the target
    step = fitted_costs(target.seconds.items(), costs.draft.seconds[1], latency_s)
    return replace(step, stride_s=costs.alone.token_s)  # the baseline has all cores


def costs_in_run(
    target: Sequence[ForwardSpan], draft: Sequence[ForwardSpan], latency_s: float, alone_s: float
) -> StepCosts | None:
    """What a run's steps cost, with token choices, plans and messages; None if their number of rows never changed.

    `alone_s` is the target's time per token without speculation.
    """
    num_drafted = sum(num_rows for _, _, num_rows in draft)
    if len({num_rows for _, _, num_rows in target}) < 2 or not num_drafted:
        return None
    draft_s = sum(end - start for start, end, _ in draft) / num_drafted
    step = fitted_costs([(num_rows, end - start) for start, end, num_rows in target], draft_s, latency_s)
    return replace(step, stride_s=alone_s)


def predict(mode: Mode, acceptance: float, step: StepCosts | None) -> Plan | None:
    """The policy's plan at this acceptance rate, with its speed-up; None for modes that do not speculate."""
    if not mode.needs_draft or step is None:
        return None
    least_gain = MIN_GAIN_AUTO if mode is Mode.AUTO else 0.0
    return best_plan(acceptance, step, overlap=mode is not Mode.SERIAL, least_gain=least_gain)
