"""The report of `bench peers`: a row for each engine run, and ratios of ours to those of the peers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import Any

from rich.console import RenderableType

from vidspec_service.bench.common.bootstrap import Estimate, estimate, rate, ratio, whiskers
from vidspec_service.bench.common.report import Plot, Report, Row, column, table
from vidspec_service.bench.common.samples import acceptance, decode_by_group, decode_rate, speedup
from vidspec_service.bench.peers.run import STOCK, EngineRun
from vidspec_service.engine.cgroups import num_cores

_OURS = "vidspec"


def peer_row(mine: EngineRun, stock: EngineRun) -> Row:
    """Results of one engine run. Rates leave out each answer's first tokens and, for peers, the draft's prefill."""
    theirs = {sample.group: sample.ids for sample in stock.samples}
    found = estimate(rate, list(decode_by_group(mine.samples).values()))
    return {
        "name": mine.name,
        "bits": mine.bits,
        "speculates": mine.speculates,
        "tokens_per_s": decode_rate(mine.samples),
        "tokens_per_s_interval": found.interval,
        "prefill_s": median(mine.prefill_s),
        "as_transformers": sum(sample.ids == theirs[sample.group] for sample in mine.samples),
        "acceptance_rate": acceptance(mine.samples)[0],
    }


def comparisons(found: Sequence[EngineRun]) -> Iterator[Row]:
    """Ratios of each of ours to the best peer, paired by prompt."""
    ours = [each for each in found if each.name.startswith(_OURS)]
    stock = next(each for each in found if each.name == STOCK)
    others = [each for each in found if each not in ours]
    for mine in ours:
        speculates, bits = mine.speculates, mine.bits
        peers = [each for each in others if each.speculates is speculates]
        if not speculates:  # leave out peers with narrower weights, which have less to read
            peers = [each for each in peers if each.bits >= bits]
        if peers:
            best = max(peers, key=lambda each: decode_rate(each.samples) or 0.0)
            yield _compared("decoding", mine, best, speedup(mine.samples, best.samples))
        if not speculates:
            rivals = [each for each in others if not each.speculates and each is not stock]
            for peer in (stock, *sorted(rivals, key=lambda each: median(each.prefill_s))[:1]):
                pairs = zip(mine.prefill_s, peer.prefill_s, strict=True)
                over = estimate(ratio, [(ours_s, 1.0, theirs_s, 1.0) for ours_s, theirs_s in pairs])
                yield _compared("prefill, time", mine, peer, over)


def _compared(what: str, mine: EngineRun, theirs: EngineRun, over: Estimate) -> Row:
    names = {"what": what, "ours": mine.name, "over": theirs.name}
    return {**names, "ratio": over.value, "ratio_interval": over.interval}


def peers_report(found: Sequence[EngineRun]) -> Report:
    """Figures, tables and a plot of the measurements."""
    stock = next(each for each in found if each.name == STOCK)
    rows, compared = [peer_row(each, stock) for each in found], list(comparisons(found))
    num_prompts, num_rows = len(stock.samples), stock.samples[0].prompt_tokens
    return Report(
        bench="peers",
        baseline=f"other engines and transformers on the same weights, {num_cores()} threads, in the same run",
        facts={"prompts": f"{num_prompts} captions of test clips, {num_rows} rows each, greedy"},
        figures={"prompts": num_prompts, "prompt_tokens": num_rows, "results": rows, "comparisons": compared},
        body=list(_body(rows, compared, num_prompts)),
        plots={"plot": Plot(size=(9, 1.5 + 0.3 * len(rows)), draw=lambda figure: draw_rates(figure, rows))},
    )


def _body(rows: Iterable[Row], compared: Iterable[Row], num_prompts: int) -> Iterator[RenderableType]:
    columns = {
        "": column("name"),
        "tokens/s": column("tokens_per_s", "{:.0f}", with_interval=True),
        "prefill ms": column("prefill_s", "{:.0f}", 1000),
        "alpha": column("acceptance_rate", "{:.0%}"),
        "as transformers": lambda row: f"{row['as_transformers']} of {num_prompts}",
    }
    yield table("Decoding and prefill on the same weights", columns, rows)
    names = {"": column("what"), "ours": column("ours"), "over": column("over")}
    yield table("Ours over theirs", {**names, "ratio": column("ratio", "{:.2f}x", with_interval=True)}, compared)
    yield "prefill: median of the language model alone, from a prompt's embeddings. Peers run without a server"
    yield "alpha: acceptance rate; as transformers: answers with the ids of `generate` in float32; (): 95 % intervals"


def draw_rates(figure: Any, rows: Sequence[Row]) -> None:
    """Draw a bar for each engine run (ours in another colour), with the interval over prompts."""
    axes = figure.add_subplot()
    for index, row in enumerate(reversed(rows)):
        value = row["tokens_per_s"] or 0.0  # no bar
        below, above = whiskers(value, row["tokens_per_s_interval"])
        colour = "#e08e45" if row["name"].startswith(_OURS) else "#1f5f8b"
        axes.barh(index, value, xerr=[[below], [above]], color=colour, capsize=3, height=0.7)
        axes.annotate(f"{value:.0f}", (value + above, index), (4, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(rows)), [row["name"] for row in reversed(rows)])
    axes.set_xlabel("tokens per second after the first")
    axes.margins(x=0.1)
