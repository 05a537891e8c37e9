"""Turns the records of runs into figures, a table and a picture.

The records come from `drive`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from extproc.demo.drive import RequestRecord

__all__ = ["RunFigures", "draw", "figures_of", "table"]


@dataclass(frozen=True, slots=True)
class RunFigures:
    """One row of the comparison; times in seconds."""

    name: str
    requests: int
    errors: int
    duration_s: float
    """From the first request sent to the last answer."""
    requests_per_s: float
    output_tokens_per_s: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    itl_mean_s: float
    """Mean inter-token latency."""
    cached_share: float
    """Prompt tokens the engines found in their cache, of all prompt tokens, 0 to 1."""
    per_endpoint: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        """Return all fields, JSON-able."""
        return asdict(self)


def quantile(values: Sequence[float], share: float) -> float:
    """Return the nearest-rank quantile; 0.0 for no values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def figures_of(name: str, records: Sequence[RequestRecord], endpoints: Sequence[str]) -> RunFigures:
    """Condense the records of one run; `endpoints` are the names to list, also those that got nothing."""
    good = [record for record in records if not record.error]
    ttft = [record.ttft_s for record in good if record.ttft_s is not None]
    gaps = [gap for record in good for gap in record.token_gaps_s]
    ends = [record.done_s for record in records if record.done_s is not None]
    duration_s = max(ends, default=0.0) - min((record.sent_s for record in records), default=0.0)
    prompt_tokens = sum(record.prompt_tokens for record in good)
    per_endpoint = dict.fromkeys(endpoints, 0)
    for record in records:
        if record.endpoint:
            per_endpoint[record.endpoint] = per_endpoint.get(record.endpoint, 0) + 1
    return RunFigures(
        name=name,
        requests=len(records),
        errors=len(records) - len(good),
        duration_s=duration_s,
        requests_per_s=len(good) / duration_s if duration_s else 0.0,
        output_tokens_per_s=sum(record.completion_tokens for record in good) / duration_s if duration_s else 0.0,
        ttft_mean_s=statistics.fmean(ttft) if ttft else 0.0,
        ttft_p50_s=quantile(ttft, 0.5),
        ttft_p99_s=quantile(ttft, 0.99),
        itl_mean_s=statistics.fmean(gaps) if gaps else 0.0,
        cached_share=sum(record.cached_tokens for record in good) / prompt_tokens if prompt_tokens else 0.0,
        per_endpoint=per_endpoint,
    )


def _ratio(better: float, worse: float) -> str:
    return f"{worse / better:.1f}x" if better > 0 else "-"


def table(rows: Sequence[RunFigures]) -> str:
    """Return the comparison as text, one column per run; the last column is the second run against the first.

    `rows[0]` is the baseline, `rows[1]` the picker.
    """
    base, ours = rows[0], rows[1]
    ms = 1000
    lines: list[tuple[str, list[str], str]] = [
        ("requests", [str(row.requests) for row in rows], ""),
        ("errors", [str(row.errors) for row in rows], ""),
        ("requests/s", [f"{row.requests_per_s:.1f}" for row in rows], _ratio(base.requests_per_s, ours.requests_per_s) + " more"),
        ("output tokens/s", [f"{row.output_tokens_per_s:.0f}" for row in rows], _ratio(base.output_tokens_per_s, ours.output_tokens_per_s) + " more"),
        ("TTFT mean, ms", [f"{row.ttft_mean_s * ms:.0f}" for row in rows], _ratio(ours.ttft_mean_s, base.ttft_mean_s) + " faster"),
        ("TTFT p50, ms", [f"{row.ttft_p50_s * ms:.0f}" for row in rows], _ratio(ours.ttft_p50_s, base.ttft_p50_s) + " faster"),
        ("TTFT p99, ms", [f"{row.ttft_p99_s * ms:.0f}" for row in rows], _ratio(ours.ttft_p99_s, base.ttft_p99_s) + " faster"),
        ("inter-token latency, ms", [f"{row.itl_mean_s * ms:.1f}" for row in rows], _ratio(ours.itl_mean_s, base.itl_mean_s) + " faster"),
        ("prompt tokens cached", [f"{row.cached_share:.0%}" for row in rows], _ratio(base.cached_share, ours.cached_share) + " more"),
        ("requests per endpoint", ["/".join(map(str, row.per_endpoint.values())) for row in rows], ""),
    ]  # fmt: skip
    heads = ["", *(row.name for row in rows), f"{ours.name} vs {base.name}"]
    body = [[label, *cells, ratio] for label, cells, ratio in lines]
    widths = [max(len(line[column]) for line in [heads, *body]) for column in range(len(heads))]
    rendered = [
        "  ".join(cell.ljust(width) if column == 0 else cell.rjust(width) for column, (cell, width) in enumerate(zip(line, widths, strict=True)))
        for line in [heads, *body]
    ]  # fmt: skip
    rule = "-" * len(rendered[0])
    return "\n".join([rendered[0], rule, *rendered[1:]])


_COLOURS = ("#8d99ae", "#1f77b4", "#c9a227", "#6a994e", "#bc4749")


def draw(rows: Sequence[RunFigures], records: Sequence[Sequence[RequestRecord]], path: Path, *, title: str) -> None:
    """Write the comparison as a picture (PNG or SVG, by the suffix of `path`): TTFT and cached share as bars, and every request's TTFT over the run."""
    import matplotlib as mpl

    mpl.use("Agg")
    # Text stays text in an SVG, and equal figures give equal files.
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "extproc"})
    from matplotlib import pyplot as plt

    figure, (left, middle, right) = plt.subplots(
        1, 3, figsize=(14, 4.6), width_ratios=(1.1, 0.8, 1.6), layout="constrained"
    )
    names = [row.name for row in rows]
    colours = [_COLOURS[number % len(_COLOURS)] for number in range(len(rows))]

    width = 0.26
    for offset, (label, values) in enumerate(
        (
            ("mean", [row.ttft_mean_s for row in rows]),
            ("p50", [row.ttft_p50_s for row in rows]),
            ("p99", [row.ttft_p99_s for row in rows]),
        )
    ):
        places = [place + (offset - 1) * width for place in range(len(rows))]
        bars = left.bar(places, values, width, color=colours, alpha=(0.95, 0.55, 0.3)[offset])
        left.bar_label(bars, labels=[f"{label}\n{value * 1000:.0f}" for value in values], fontsize=7)
    left.set_xticks(range(len(rows)), names, rotation=15)
    left.set_ylabel("seconds")
    left.set_title("time to first token (labels in ms; lower is better)", fontsize=10)
    left.margins(y=0.18)

    bars = middle.bar(names, [row.cached_share * 100 for row in rows], color=colours)
    middle.bar_label(bars, fmt="%.0f %%", fontsize=8)
    middle.set_ylim(0, 100)
    middle.set_ylabel("% of prompt tokens")
    middle.tick_params(axis="x", rotation=15)
    middle.set_title("found in the KV cache (higher is better)", fontsize=10)

    for row, run, colour in zip(rows, records, colours, strict=True):
        points = [(record.sent_s, record.ttft_s) for record in run if record.ttft_s is not None]
        right.scatter([x for x, _ in points], [y for _, y in points], s=9, color=colour, label=row.name, alpha=0.7)
    right.set_yscale("log")
    right.set_xlabel("request sent, seconds into the run")
    right.set_ylabel("seconds")
    right.set_title("time to first token of each request", fontsize=10)
    right.legend(fontsize=8)

    figure.suptitle(title, fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
