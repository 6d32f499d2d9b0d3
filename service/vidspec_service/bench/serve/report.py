"""The report of `bench serve`: percentiles, goodput, refused and lost requests from outcomes, as tables and curves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import RenderableType

from vidspec_service.bench.common.options import number
from vidspec_service.bench.common.report import Plot, Report, Row, column, table
from vidspec_service.bench.serve.load import RequestOutcome

_REFUSALS = (429, 503)
_PERCENTILES = {"p50": 50, "p90": 90, "p95": 95, "p99": 99, "worst": 100}
_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Objectives:
    """Limits within which an answer counts as goodput; and the server's own deadline, request_timeout_s."""

    ttft_s: float = number(2.0, "--slo-ttft-s", "longest time to the first token in goodput", "S")
    tpot_s: float = number(0.1, "--slo-tpot-s", "longest time per output token in goodput", "S")
    deadline_s: float = 120.0

    def are_met(self, outcome: RequestOutcome) -> bool:
        """Whether a complete answer meets both limits."""
        return (outcome.ttft_s or 0.0) <= self.ttft_s and (outcome.tpot_s is None or outcome.tpot_s <= self.tpot_s)


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Percentiles of times in seconds; None if there are no values."""
    if not values:
        return None
    return dict(zip(_PERCENTILES, np.percentile(values, list(_PERCENTILES.values())).tolist(), strict=True))


def load_result(
    name: str, outcomes: Sequence[RequestOutcome], duration_s: float, objectives: Objectives, *, is_open: bool
) -> Row:
    """Results of one load. Latencies and goodput count complete answers only; goodput, those within both objectives.

    A closed load has no offered rate: it sends the next request when one ends.
    """
    complete = [outcome for outcome in outcomes if outcome.is_complete]
    left = [outcome for outcome in outcomes if outcome.left_early]
    refused = [outcome for outcome in outcomes if outcome.status in _REFUSALS]
    wrong = [outcome for outcome in outcomes if not outcome.is_complete and not outcome.left_early]
    sent_s = max((outcome.due_s for outcome in outcomes if is_open), default=0.0)
    return {
        "name": name,
        "num_requests": len(outcomes),
        "duration_s": duration_s,
        "offered_per_s": len(outcomes) / sent_s if sent_s > 0 else None,
        "answered_per_s": len(complete) / duration_s,
        "goodput_per_s": sum(map(objectives.are_met, complete)) / duration_s,
        "tokens_per_s": sum(outcome.num_tokens for outcome in complete) / duration_s,
        "ttft": percentiles([outcome.ttft_s for outcome in complete if outcome.ttft_s is not None]),
        "tpot": percentiles([outcome.tpot_s for outcome in complete if outcome.tpot_s is not None]),
        "e2e": percentiles([outcome.e2e_s for outcome in complete]),
        "num_answered": len(complete),
        "num_left_early": len(left),
        "num_refused": len(refused),
        "num_lost": len(outcomes) - len(complete) - len(left) - len(refused),  # failed, though the client stayed
        "num_late": sum(outcome.e2e_s > objectives.deadline_s for outcome in complete),
        "refusal": percentiles([outcome.e2e_s for outcome in refused]),  # from due time to refusal
        "errors": dict(Counter(f"{each.status} {each.code or 'without an end'}" for each in wrong).most_common()),
    }


def serve_report(
    loads: Sequence[Row], outcomes: Mapping[str, Sequence[RequestOutcome]], soak: Row | None, served: Row
) -> Report:
    """`served`: model, server and settings. `outcomes` has every request, so that every figure can be recomputed."""
    body = [part for load in loads for part in _of_load(load)]
    is_whole = not any(load["num_lost"] for load in loads)
    if soak is not None:
        body.append(_footprints(soak))
        before, after = soak["before"], soak["after"]
        is_whole = is_whole and not after["num_files"] and after["num_processes"] <= before["num_processes"]
    return Report(
        bench="serve",
        baseline="none: absolute figures of this server on this machine; a local server shares it with its client",
        facts={
            "server": f"{served['server']}: {served['model']}",
            "settings": ", ".join(f"{name} {value}" for name, value in served["settings"].items()),
        },
        figures={**served, "loads": loads, "soak": soak, "outcomes": outcomes},
        failure=None if is_whole else "requests were lost, or files or processes were left over, see above",
        body=body,
        plots={"plot": Plot(size=(9, 4.5 if soak is None else 8), draw=lambda figure: _draw(figure, outcomes, soak))},
    )


def _of_load(load: Row) -> Iterator[RenderableType]:
    named = {"first token": "ttft", "per token": "tpot", "whole answer": "e2e", "refusal": "refusal"}
    rows = [{"ms": name, **load[key]} for name, key in named.items() if load[key] is not None]
    columns = {"ms": column("ms"), **{name: column(name, "{:.1f}", 1000) for name in _PERCENTILES}}
    yield table(f"{load['name']}: {load['num_requests']} requests in {load['duration_s']:.1f} s", columns, rows)
    offered = "" if load["offered_per_s"] is None else f"offered {load['offered_per_s']:.2f}/s, "
    yield (
        f"{offered}answered {load['answered_per_s']:.2f}/s, "
        f"goodput {load['goodput_per_s']:.2f}/s, {load['tokens_per_s']:.1f} tokens/s"
    )
    yield (
        f"answered {load['num_answered']} ({load['num_late']} after the deadline), refused {load['num_refused']}, "
        f"left early {load['num_left_early']}, lost {load['num_lost']}"
    )
    if load["errors"]:
        yield "errors: " + ", ".join(f"{count} x {error}" for error, count in load["errors"].items())


def _footprints(soak: Row) -> RenderableType:
    columns = {
        "": column(""),
        "resident MiB": column("resident_bytes", "{:.1f}", 1 / _MIB),
        "processes": column("num_processes"),
        "descriptors": column("num_descriptors"),
        "upload files": column("num_files"),
    }
    title = f"After {soak['num_warm_up']} requests of warm-up, and after {soak['num_requests']} more"
    made = table(title, columns, [{"": name, **soak[name]} for name in ("before", "after")])
    made.add_row("growth", f"{100 * soak['growth']:+.2f} %")
    return made


def _draw(figure: Any, outcomes: Mapping[str, Sequence[RequestOutcome]], soak: Row | None) -> None:
    """Draw cumulative shares of requests over seconds; for a soak, also resident memory over requests (below)."""
    shares, *below = figure.subplots(1 if soak is None else 2, 1, squeeze=False)[:, 0]
    for name, of_load in outcomes.items():
        complete = [outcome for outcome in of_load if outcome.is_complete]
        curves = {
            "first token": [each.ttft_s for each in complete if each.ttft_s is not None],
            "whole answer": [each.e2e_s for each in complete],
            "refusal": [each.e2e_s for each in of_load if each.status in _REFUSALS],
        }
        for what, values in curves.items():
            if values:
                shares.ecdf(values, label=f"{name}: {what}")
    shares.set_xscale("log")
    shares.set_xlabel("seconds since the request was due")
    shares.set_ylabel("share of requests")
    if shares.get_legend_handles_labels()[0]:
        shares.legend()
    if soak is not None:
        (memory,) = below
        samples = soak["samples"]
        memory.plot([done for done, _ in samples], [held["resident_bytes"] / _MIB for _, held in samples])
        memory.set_ylim(bottom=0)
        memory.set_xlabel("requests ended after warm-up")
        memory.set_ylabel("resident MiB, all processes")
