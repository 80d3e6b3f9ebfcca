"""`bench --report`: one HTML file that opens anywhere, with no network."""

from __future__ import annotations

from html import escape

from edge_agent.bench.bench_report import BenchReport, rows
from edge_agent.bench.svg_chart import bars, lines

STYLE = """
:root{color-scheme:light;--paper:#f6f5f0;--card:#fffefb;--ink:#1b211e;--muted:#586159;--line:#dedbd0}
*{box-sizing:border-box}body{margin:0 auto;max-width:1080px;padding:28px 20px 48px;background:var(--paper);
color:var(--ink);font:16px/1.55 system-ui,"Segoe UI","Noto Sans",sans-serif;font-variant-numeric:tabular-nums}
h1{font-size:1.6rem;letter-spacing:-.02em;margin:0 0 4px}h2{font-size:1.1rem;margin:0 0 8px}
p{margin:0 0 8px;max-width:68ch}.card{background:var(--card);border:1px solid var(--line);border-radius:14px;
padding:18px 20px;margin-top:18px;overflow-x:auto}.big{font-size:2rem;font-weight:700;letter-spacing:-.02em;margin:0}
.hint{color:var(--muted);font-size:.875rem}table{border-collapse:collapse;width:100%;font-size:.875rem}
th,td{padding:6px 10px;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th:first-child,td:first-child{text-align:left;padding-left:0;font-weight:400}.quiet *{color:var(--muted)}
thead th{color:var(--muted);font-weight:500;
white-space:normal;vertical-align:bottom}svg{max-width:100%;height:auto}svg text{font-size:12px;fill:var(--muted)}
.grid{stroke:var(--line);fill:none}.whisker{stroke:var(--ink);stroke-width:1.5;fill:none}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;list-style:none;margin:8px 0 0;padding:0;font-size:.875rem}
"""
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def html_report(report: BenchReport) -> str:
    """The whole file. Texts of the prompts and answers are not in it, only figures."""
    found = report["conditions"]
    draft = f", draft {found['draft']}" if found["draft"] else ""
    title = f"{found['model']}{draft}"
    facts = (
        f"{found['machine']}, {found['cores']} cores, ONNX Runtime {found['onnxruntime']}, {found['at']}. "
        f"{found['prompts']} prompts, {found['repeats']} repeats, up to {found['max_tokens']} tokens an answer, greedy."
    )
    sections = [_headline(report), _table(report), _speed(report), _acceptance(report), _curve(report), _method(report)]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f"<title>Souschef bench: {escape(title)}</title><style>{STYLE}</style></head><body>"
        f"<h1>{escape(title)}</h1><p>{escape(facts)}</p>{''.join(sections)}</body></html>\n"
    )


def _headline(report: BenchReport) -> str:
    auto = next((figures for figures in report["contenders"] if figures["name"] == "auto"), None)
    if auto is None or auto["decode_speedup"] is None or auto["speedup"] is None:
        return ""
    return _card(
        "The policy against direct decoding",
        f'<p class="big">{auto["decode_speedup"]:.2f}× decoding, {auto["speedup"]:.2f}× from request to last token</p>'
        '<p class="hint">Geometric mean over the scenarios of ratios of medians. 1.00× is no gain.</p>',
    )


def _table(report: BenchReport) -> str:
    names = "".join(f'<th scope="col">{escape(figures["name"])}</th>' for figures in report["contenders"])
    body = "".join(
        f'<tr{" class=quiet" if row.label.startswith(" ") else ""}><th scope="row">{escape(row.label)}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in row.cells)
        + "</tr>"
        for row in rows(report)
    )
    found = report["conditions"]
    memory = f"Target: {found['target_weight_bytes'] / 1e6:,.0f} MB of weights; "
    added = f"the draft model adds {found['draft_memory_bytes'] / 1e6:,.0f} MB to resident memory."
    memory += added if found["draft"] else "look-ups add next to none."
    return _card(
        "Figures",
        f"<table><thead><tr><td></td>{names}</tr></thead><tbody>{body}</tbody></table>"
        f'<p class="hint">Medians. {escape(memory)} '
        f"Energy: {escape(_energy(found['energy_source']))}.</p>",
    )


def _speed(report: BenchReport) -> str:
    categories = dict.fromkeys(category for figures in report["contenders"] for category in figures["categories"])
    groups = {
        category: {figures["name"]: figures["categories"].get(category) for figures in report["contenders"]}
        for category in categories
    }
    return _card("Decoding speed by scenario, tokens a second", bars(groups, "tokens a second"))


def _acceptance(report: BenchReport) -> str:
    series = {figures["name"]: figures["acceptance_by_position"] for figures in report["contenders"]}
    if not any(series.values()):
        return ""
    return _card(
        "Acceptance by position in the draft, given that the tokens before stood",
        lines(series, "share accepted", "position in the draft"),
    )


def _curve(report: BenchReport) -> str:
    values = report["conditions"]["verify_ms"]
    if not values:
        return ""
    return _card(
        "Cost of one target pass over m positions, ms",
        lines({report["conditions"]["model"]: values}, "ms", "m positions")
        + '<p class="hint">A flat line would make verifying free. Where it rises steeply, long drafts lose.</p>',
    )


def _method(report: BenchReport) -> str:
    return _card(
        "How it was measured",
        "<p>Every prompt went to each contender in turn before the next prompt, and who began moved on each time, so "
        "that a slow spell of the machine falls on all. Caches were emptied before every answer of ours; one short "
        "answer each came first and isn't counted. Ours ran in this process; a peer was asked over HTTP, whose cost is "
        f"in its times. Drafters alone draft {report['conditions']['gamma']} tokens in every round; auto lets the "
        "policy decide.</p><p>Texts may differ where the target's two best tokens all but tie: one row and several go "
        "through different INT4 kernels.</p>",
    )


def _card(title: str, body: str) -> str:
    return f'<section class="card"><h2>{escape(title)}</h2>{body}</section>'


def _energy(source: str) -> str:
    return {
        "rapl": "measured, CPU package (RAPL)",
        "battery": "measured at the battery",
        "cpu_time_model": "estimated from busy core time, not measured",
        "simulated": "simulated device",
    }.get(source, source)
