"""The dashboards: what each shows, and the query behind it. Prometheus' rules make the ratios that alerts use too."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import QueryVariable
from grafana_foundation_sdk.models.dashboard import Dashboard

from deploy.grafana.panels import (
    Marks,
    Section,
    Series,
    board,
    choice,
    gauge,
    heat,
    lines,
    quantiles,
    rate,
    value,
)

EDGE = "souschef_edge"
CLOUD = "souschef_cloud"
BY_INSTANCE = "{{instance}}"
SHARE = "percentunit"
UNUSUAL = ', reason!~"nominal|requested"'
"""Decisions worth a mark."""


def boards() -> dict[str, Dashboard]:
    """Every dashboard by its file's name."""
    return {"overview": overview(), "speculation": speculation(), "device": device(), "cloud": cloud()}


def overview() -> Dashboard:
    """Is it well, and where does the time go?"""
    summary = (
        value("Requests", "Requests that ended, a second.", "reqps", _rule("souschef:requests:rate5m")),
        value("Errors", "Share that ended in an error.", SHARE, _rule("souschef:request_errors:ratio_rate5m")),
        value(
            "First token p95",
            "1 in 20 requests waits longer.",
            "s",
            _rule("souschef:time_to_first_token_seconds:p95_5m"),
        ),
        value("Tokens", "Tokens of answers, a second.", "short", _rule("souschef:tokens:rate5m")),
        value("Acceptance", "Accepted draft tokens.", SHARE, _rule("souschef:acceptance:ratio_rate15m")),
        value("From the cloud", "Share of the tokens.", SHARE, _rule("souschef:cloud_tokens:ratio_rate5m")),
        value("Services up", "Edges and clouds.", "short", 'sum by (job) (up{job=~"edge|cloud"})', "{{job}}"),
        value(
            "Alerts firing",
            "docs/runbook.md says what to do.",
            "short",
            'count(ALERTS{alertstate="firing"}) or vector(0)',
            "alerts",
        ),
    )
    requests = (
        lines(
            "Requests by how they ended",
            "cancelled: the client left; refused: the queue was full or the service was stopping.",
            "reqps",
            Series(rate(f"{EDGE}_requests_total", "finish_reason"), "{{finish_reason}}"),
            stacked=True,
        ),
        lines(
            "Requests at work",
            "Being answered, and in the queue.",
            "short",
            Series(gauge(f"{EDGE}_requests_running"), "{{instance}} running"),
            Series(gauge(f"{EDGE}_requests_waiting"), "{{instance}} waiting"),
        ),
        lines("Wait for a place", "Time in the queue.", "s", *quantiles(f"{EDGE}_queue_time_seconds")),
    )
    latency = (
        lines(
            "Time to first token",
            "From the request to its first token.",
            "s",
            *quantiles(f"{EDGE}_time_to_first_token_seconds"),
        ),
        lines(
            "Time per token",
            "After the first one.",
            "s",
            *quantiles(f"{EDGE}_inter_token_latency_seconds"),
        ),
        lines(
            "Request latency",
            "From the request to the last byte.",
            "s",
            *quantiles(f"{EDGE}_request_latency_seconds"),
        ),
    )
    tokens = (
        lines(
            "Tokens by origin",
            "draft: proposed on the device and accepted; target: the device's own model; cloud: the cloud's.",
            "short",
            Series(rate(f"{EDGE}_tokens_total", "origin"), "{{origin}}"),
            width=6,
            stacked=True,
        ),
        lines(
            "Rounds by mode",
            "What the policy decided, a second.",
            "short",
            Series(rate(f"{EDGE}_decisions_total", "mode"), "{{mode}}"),
            width=6,
            stacked=True,
        ),
        lines(
            "Handoffs per request",
            "Switches of who produces the next tokens.",
            "short",
            Series(_rule("souschef:handoffs_per_request:ratio_rate5m"), BY_INSTANCE),
            width=6,
        ),
        lines(
            "Tokens in the caches",
            "Held for the requests at work and for the next ones that begin alike.",
            "short",
            Series(gauge(f"{EDGE}_kv_cache_tokens"), BY_INSTANCE),
            width=6,
        ),
    )
    sections = (
        Section("Now", summary),
        Section("Requests", requests),
        Section("Latency", latency),
        Section("Tokens", tokens),
    )
    return board("souschef-overview", "Souschef / Overview", "Requests, latency, tokens.", _edges(), sections)


def speculation() -> Dashboard:
    """Does drafting pay?"""
    accepted, drafted, rounds = (f"{EDGE}_{name}_total" for name in ("accepted_tokens", "draft_tokens", "draft_rounds"))
    acceptance = (
        lines(
            "Acceptance rate by drafter",
            "Accepted over drafted tokens. Rounds without a draft are no sample; the bonus token doesn't count.",
            SHARE,
            Series(f"{rate(accepted, 'drafter')} / ({rate(drafted, 'drafter')} > 0)", "{{drafter}}"),
        ),
        lines(
            "Acceptance by position",
            "Share of the rounds with a draft in which the draft's token at this place was accepted.",
            SHARE,
            Series(
                f"{rate(f'{EDGE}_accepted_tokens_per_position_total', 'position')} "
                f"/ on () group_left () (sum({rate(rounds, 'instance')}) > 0)",
                "{{position}}",
            ),
        ),
        lines(
            "Tokens per round",
            "Accepted draft tokens of a round with a draft, and the target's own one.",
            "short",
            Series(f"1 + {rate(accepted, 'instance')} / ({rate(rounds, 'instance')} > 0)", BY_INSTANCE),
        ),
    )
    length = (
        heat("Gamma", "Draft tokens that the policy asked for in a round.", f"{EDGE}_gamma"),
        lines(
            "Draft length by drafter",
            "Tokens really proposed in a round with a draft.",
            "short",
            Series(f"{rate(drafted, 'drafter')} / ({rate(rounds, 'drafter')} > 0)", "{{drafter}}"),
        ),
        lines(
            "Speed-up, estimated",
            "Time without drafts over time with them, from the measured cost curve; under 1 drafting loses.",
            "x",
            Series(gauge(f"{EDGE}_speculation_speedup_estimate"), BY_INSTANCE),
        ),
    )
    drafters = (
        lines("Rounds by drafter", "A second.", "short", Series(rate(rounds, "drafter"), "{{drafter}}"), stacked=True),
        lines(
            "Drafted and accepted tokens",
            "What lies between the two was drafted in vain.",
            "short",
            Series(rate(drafted, "instance"), "{{instance}} drafted"),
            Series(rate(accepted, "instance"), "{{instance}} accepted"),
        ),
        lines(
            "Decisions by reason",
            "Rounds, a second.",
            "short",
            Series(rate(f"{EDGE}_decisions_total", "mode, reason"), "{{mode}} {{reason}}"),
            stacked=True,
        ),
    )
    sections = (Section("Acceptance", acceptance), Section("Length", length), Section("Drafters", drafters))
    return board(
        "souschef-speculation",
        "Souschef / Speculation",
        "Acceptance, draft length, what drafting is worth.",
        _edges(),
        sections,
    )


def device() -> Dashboard:
    """How hot, how full, and what the policy made of it: decisions are marks on every panel."""
    state = (
        lines(
            "Temperature",
            "Of the device's processor.",
            "celsius",
            Series(gauge(f"{EDGE}_device_temperature_celsius"), BY_INSTANCE),
        ),
        lines(
            "Headroom",
            "At 1.0 throttling begins (Android's scale).",
            "short",
            Series(gauge(f"{EDGE}_device_headroom"), BY_INSTANCE),
        ),
        lines(
            "Battery",
            "Charge, and 100 while it is being charged.",
            "percent",
            Series(gauge(f"{EDGE}_device_battery_percent"), "{{instance}} charge"),
            Series(f"100 * {gauge(f'{EDGE}_device_charging')}", "{{instance}} charging"),
        ),
    )
    energy = (
        lines(
            "Energy per token",
            "By what it was spent on.",
            "joule",
            Series(
                f"{rate(f'{EDGE}_energy_joules_total', 'component')} "
                f"/ on () group_left () (sum({rate(f'{EDGE}_tokens_total', 'instance')}) > 0)",
                "{{component}}",
            ),
            stacked=True,
        ),
        lines(
            "Power",
            "Spent on inference, by how it is known.",
            "watt",
            Series(rate(f"{EDGE}_energy_joules_total", "instance, source"), "{{instance}} {{source}}"),
        ),
        lines(
            "Age of the latest reading",
            "Old readings are forgotten: the device's state is then unknown.",
            "s",
            Series(gauge(f"{EDGE}_sensor_age_seconds"), BY_INSTANCE),
        ),
    )
    policy = (
        lines(
            "Rounds by mode",
            "What the policy decided, a second.",
            "short",
            Series(rate(f"{EDGE}_decisions_total", "mode"), "{{mode}}"),
            width=12,
            stacked=True,
        ),
        lines(
            "Handoffs",
            "Where the next tokens came from, and why.",
            "short",
            Series(rate(f"{EDGE}_handoffs_total", "to, reason"), "to {{to}}: {{reason}}"),
            width=12,
            stacked=True,
        ),
    )
    marks = (
        Marks(
            "Decisions", _marked("decisions", "mode, reason", UNUSUAL), "{{instance}}: {{mode}} ({{reason}})", "blue"
        ),
        Marks("Handoffs", _marked("handoffs", "to, reason"), "{{instance}}: to {{to}} ({{reason}})", "orange"),
    )
    sections = (Section("Device", state), Section("Energy", energy), Section("Policy", policy))
    return board(
        "souschef-device",
        "Souschef / Device",
        "Temperature, battery, energy, and the decisions they led to.",
        _edges(),
        sections,
        marks,
    )


def cloud() -> Dashboard:
    """Is the verifier quick, full, and does it keep its sessions?"""
    work = (
        lines("Verify latency", "Within the service.", "s", *quantiles(f"{CLOUD}_verify_latency_seconds")),
        lines("Wait for a batch", "Time in the queue.", "s", *quantiles(f"{CLOUD}_queue_time_seconds")),
        heat("Batch size", "Sessions in one pass.", f"{CLOUD}_batch_size"),
    )
    throughput = (
        lines(
            "Verify requests by outcome",
            "A second.",
            "reqps",
            Series(rate(f"{CLOUD}_verify_requests_total", "outcome"), "{{outcome}}"),
            width=6,
            stacked=True,
        ),
        lines(
            "Draft tokens by verdict",
            "A second.",
            "short",
            Series(rate(f"{CLOUD}_verified_tokens_total", "result"), "{{result}}"),
            width=6,
            stacked=True,
        ),
        lines(
            "Tokens generated",
            "For answers that the cloud makes alone.",
            "short",
            Series(rate(f"{CLOUD}_generated_tokens_total", "instance"), BY_INSTANCE),
            width=6,
        ),
        lines(
            "Model busy",
            "Share of the time in which it computes; at 100 % the replica is full.",
            SHARE,
            Series(rate(f"{CLOUD}_busy_seconds_total", "instance"), BY_INSTANCE),
            width=6,
        ),
    )
    sessions = (
        lines("Sessions", "Held by each replica.", "short", Series(gauge(f"{CLOUD}_sessions"), BY_INSTANCE), width=6),
        lines(
            "Caches rebuilt",
            "A replica got a session whose cache it didn't hold.",
            "short",
            Series(rate(f"{CLOUD}_session_rebuilds_total", "cause"), "{{cause}}"),
            width=6,
        ),
        lines(
            "Replies repeated",
            "The same request came again and got the same reply.",
            "short",
            Series(rate(f"{CLOUD}_replays_total", "instance"), BY_INSTANCE),
            width=6,
        ),
        lines(
            "Redis errors and requests turned away",
            "Neither stops a session that its replica still holds.",
            "short",
            Series(_rule("souschef:cloud_store_errors:rate5m"), "{{instance}} Redis errors"),
            Series(_rule("souschef:cloud_rejections:rate5m"), "{{instance}} turned away"),
            width=6,
        ),
    )
    link = (
        lines(
            "Round trip, seen by the edges",
            "Median and p95 of all edges.",
            "s",
            *(
                Series(
                    f"histogram_quantile({level}, sum by (le) "
                    f"(rate({EDGE}_cloud_rtt_seconds_bucket[$__rate_interval])))",
                    f"p{level * 100:.0f}",
                )
                for level in (0.5, 0.95)
            ),
        ),
        lines(
            "Bytes between edges and cloud",
            "A second, by direction.",
            "Bps",
            Series(f"sum by (direction) (rate({EDGE}_cloud_bytes_total[$__rate_interval]))", "{{direction}}"),
        ),
        lines(
            "Circuit to the cloud",
            "0 closed, 1 half open, 2 open: the edge answers alone.",
            "short",
            Series(f"{EDGE}_circuit_state", BY_INSTANCE),
        ),
    )
    fleet = (
        lines(
            "Devices by mode",
            "Devices that report, by the mode of their latest round; none: nothing was decoded that they may speak of.",
            "short",
            Series(_of_fleet("devices", " by (mode)"), "{{mode}}"),
            stacked=True,
        ),
        lines(
            "Devices in trouble",
            "hot: too hot to work as they are; without drafts: they decode, but nothing is drafted.",
            "short",
            Series(_of_fleet("hot_devices"), "hot"),
            Series(_of_fleet("undrafted_devices"), "without drafts"),
        ),
        lines(
            "Acceptance on the devices",
            "The mean of those that draft.",
            SHARE,
            Series(_of_fleet("acceptance"), "acceptance"),
        ),
    )
    sections = (
        Section("Work", work),
        Section("Throughput", throughput),
        Section("Sessions", sessions),
        Section("Link", link),
        Section("Fleet", fleet),
    )
    variables = (choice("instance", "Replica", f"label_values({CLOUD}_sessions, instance)"),)
    return board(
        "souschef-cloud",
        "Souschef / Cloud",
        "Verify latency, batches, sessions, the link, the fleet.",
        variables,
        sections,
    )


def _of_fleet(metric: str, by: str = "") -> str:
    """With Redis every replica tells of the whole fleet; without it each of the devices that it hears."""
    return f"max{by} ({gauge(f'{CLOUD}_fleet_{metric}')})"


def _edges() -> tuple[QueryVariable, ...]:
    """Edges by their target model."""
    info = f"{EDGE}_model_info"
    return (
        choice("model", "Model", f"label_values({info}, target)"),
        choice("instance", "Instance", f'label_values({info}{{target=~"$model"}}, instance)'),
    )


def _rule(record: str) -> str:
    return f'{record}{{instance=~"$instance"}}'


def _marked(counter: str, by: str, labels: str = "") -> str:
    """Where something of the kind was counted; a counter that is new has no rate yet and is a mark by itself."""
    metric = f"{EDGE}_{counter}_total"
    chosen = f'{metric}{{instance=~"$instance"{labels}}}'
    new = f"sum by (instance, {by}) ({chosen} unless {chosen} offset $__rate_interval)"
    return f"{rate(metric, f'instance, {by}', labels)} > 0 or {new}"
