"""What `bench structured` says: a row for each form, its modes side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import RenderableType

from vidspec_service.bench.common.bootstrap import estimate, ratio
from vidspec_service.bench.common.facts import Provenance, hardware, num_cores
from vidspec_service.bench.common.report import Report, Row, column, table
from vidspec_service.bench.common.samples import Work, decoding, decoding_by_group, total_speculation
from vidspec_service.bench.structured.run import MODES, Form, Judged, StructuredOptions
from vidspec_service.engine.config import EngineConfig

_OFF, _PARALLEL = MODES


def form_row(form: Form, judged: Mapping[Form, Judged], num_clips: int) -> Row:
    """Rates leave out each answer's first token. `over_caption` compares with plain captions, mode off."""
    mine, captions = judged[form], judged[Form.CAPTION]
    off, parallel = decoding(mine.samples[_OFF]), decoding(mine.samples[_PARALLEL])
    caption_off = decoding(captions.samples[_OFF])
    speedup, caption_speedup = _ratio(parallel, off), _ratio(decoding(captions.samples[_PARALLEL]), caption_off)
    num_tokens = sum(len(sample.ids) for sample in mine.samples[_OFF])
    speculation = total_speculation(mine.samples[_PARALLEL])
    return {
        "form": form.value,
        "tokens": num_tokens / num_clips,
        "tokens_per_s_off": off.rate,
        "tokens_per_s_parallel": parallel.rate,
        "over_caption": _ratio(off, caption_off),
        "speedup": speedup,
        "speedup_interval": _interval(mine),
        "speedup_over_captions": speedup / caption_speedup if caption_speedup else 0.0,
        "acceptance_rate": speculation.acceptance_rate,
        "accepted_per_verification": speculation.mean_accepted_tokens,
        "forced": mine.num_forced / num_tokens,
        "valid": mine.num_valid / num_clips,
        "all_facts_right": mine.num_right / num_clips,
        "identical": mine.is_identical,
    }


def _interval(judged: Judged) -> tuple[float, float]:
    """95 % of the speed-up when clips are drawn again."""
    parallel, off = (decoding_by_group(judged.samples[mode]) for mode in (_PARALLEL, _OFF))
    rows = [(parallel[clip].tokens, parallel[clip].seconds, off[clip].tokens, off[clip].seconds) for clip in off]
    found = estimate(ratio, rows)
    return found.low, found.high


def _ratio(ours: Work, base: Work) -> float:
    return ours.rate / base.rate if base.rate > 0 else 0.0


def structured_report(
    options: StructuredOptions, pair: EngineConfig, judged: Mapping[Form, Judged], provenance: Provenance
) -> Report:
    """Figures and table of what was measured."""
    rows = [form_row(form, judged, options.num_clips) for form in Form]
    assert pair.draft is not None
    models = f"target {pair.target.model}, draft {pair.draft.model}"
    law = options.sampling
    return Report(
        bench="structured",
        baseline=f"plain captions in the same run; speed-ups over off: the target alone, {num_cores()} threads",
        provenance=provenance,
        hardware=hardware(),
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
            "identical": all(row["identical"] for row in rows),
            "results": rows,
        },
        body=list(_body(rows)),
    )


def _body(rows: Sequence[Row]) -> Iterator[RenderableType]:
    columns = {
        "form": column("form"),
        "tokens": column("tokens", "{:.0f}"),
        "off tok/s": column("tokens_per_s_off", "{:.0f}"),
        "ratio": column("over_caption", "{:.2f}x"),
        "parallel": column("tokens_per_s_parallel", "{:.0f}"),
        "speed-up": _speedup,
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


def _speedup(row: Row) -> str:
    low, high = row["speedup_interval"]
    return f"{row['speedup']:.2f}x ({low:.2f}..{high:.2f})"
