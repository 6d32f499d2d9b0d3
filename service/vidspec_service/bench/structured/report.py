"""What `bench structured` says: a row for each form, its modes side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import RenderableType

from vidspec_service.bench.common.facts import num_cores
from vidspec_service.bench.common.report import Report, Row, column, table, with_span
from vidspec_service.bench.common.samples import decoding, speedup, total_speculation
from vidspec_service.bench.structured.run import MODES, Form, Judged, StructuredOptions
from vidspec_service.engine.config import EngineConfig

_OFF, _PARALLEL = MODES


def form_row(form: Form, judged: Mapping[Form, Judged], num_clips: int) -> Row:
    """Rates leave out each answer's first tokens. `over_caption` compares with plain captions, mode off."""
    mine, captions = judged[form], judged[Form.CAPTION]
    gain, captions_gain = (speedup(of.samples[_PARALLEL], of.samples[_OFF]) for of in (mine, captions))
    num_tokens = sum(len(sample.ids) for sample in mine.samples[_OFF])
    speculation = total_speculation(mine.samples[_PARALLEL])
    return {
        "form": form.value,
        "tokens": num_tokens / num_clips,
        "tokens_per_s_off": decoding(mine.samples[_OFF]).rate,
        "tokens_per_s_parallel": decoding(mine.samples[_PARALLEL]).rate,
        "over_caption": speedup(mine.samples[_OFF], captions.samples[_OFF]).value,
        "speedup": gain.value,
        "speedup_interval": gain.interval,
        "speedup_over_captions": _over(gain.value, captions_gain.value),
        "acceptance_rate": speculation.acceptance_rate,
        "accepted_per_verification": speculation.mean_accepted_tokens,
        "forced": mine.num_forced / num_tokens,
        "valid": mine.num_valid / num_clips,
        "all_facts_right": mine.num_right / num_clips,
        "identical": mine.is_identical,
    }


def _over(one: float | None, other: float | None) -> float | None:
    return one / other if one is not None and other else None


def structured_report(options: StructuredOptions, pair: EngineConfig, judged: Mapping[Form, Judged]) -> Report:
    """Figures and table of what was measured."""
    rows = [form_row(form, judged, options.num_clips) for form in Form]
    assert pair.draft is not None
    models = f"target {pair.target.model}, draft {pair.draft.model}"
    law, is_identical = options.sampling, all(row["identical"] for row in rows)
    return Report(
        bench="structured",
        baseline=f"plain captions in the same run; speed-ups over off: the target alone, {num_cores()} threads",
        subject=f"{models}; {options.num_clips} clips",
        facts={
            "models": models,
            "clips": f"{options.num_clips}, at most {options.max_tokens} tokens an answer, "
            + (f"temperature {law.temperature:g}, seed {law.seed}" if law.temperature else "greedy"),
        },
        figures={
            "clips": options.num_clips,
            "max_tokens": options.max_tokens,
            "sampling": law,
            "identical": is_identical,
            "results": rows,
        },
        body=list(_body(rows)),
        failure=None if is_identical else "the modes did not give the same token ids",
    )


def _body(rows: Sequence[Row]) -> Iterator[RenderableType]:
    columns = {
        "form": column("form"),
        "tokens": column("tokens", "{:.0f}"),
        "off tok/s": column("tokens_per_s_off", "{:.0f}"),
        "ratio": column("over_caption", "{:.2f}x"),
        "parallel": column("tokens_per_s_parallel", "{:.0f}"),
        "speed-up": lambda row: with_span(row["speedup"], row["speedup_interval"], "{:.2f}x"),
        "ratio ": column("speedup_over_captions", "{:.2f}x"),
        "alpha": column("acceptance_rate", "{:.0%}"),
        "accepted": column("accepted_per_verification", "{:.1f}"),
        "forced": column("forced", "{:.0%}"),
        "valid": column("valid", "{:.0%}"),
        "right": column("all_facts_right", "{:.0%}"),
        "same": lambda row: "yes" if row["identical"] else "NO",
    }
    yield table("Answers with and without a grammar", columns, rows)
    yield "ratio: to plain captions; alpha: acceptance rate; accepted: draft tokens a verification;"
    yield "same: the ids of both modes; forced: tokens that the grammar leaves no choice about;"
    yield "valid: the answer can be read in full; right: it states every fact of the clip, and none wrongly"
