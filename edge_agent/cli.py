"""What can be typed after `edge-agent`. Each command imports what it needs, so that `--help` comes at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from edge_agent.commands.bench import bench
from edge_agent.commands.calibrate import calibrate
from edge_agent.commands.distill import distill
from edge_agent.commands.simulate import simulate
from edge_agent.commands.sustain import sustain
from edge_agent.config import EdgeSettings, Preset, load_settings

app = typer.Typer(
    name="edge-agent",
    help="An OpenAI-compatible LLM server for this device: a small draft proposes, a larger target approves.",
    epilog="First steps: `edge-agent serve`, then `edge-agent chat --url http://127.0.0.1:8080`. Every option can also "
    "stand in souschef.toml (`port = 9000`) or in the environment (SOUSCHEF_PORT=9000); options win, then the "
    "environment, then the file.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
models_app = typer.Typer(help="What models there are, fetching them, and what is known of one.", no_args_is_help=True)
app.add_typer(models_app, name="models")

Config = Annotated[Path | None, typer.Option(help="Settings file; souschef.toml here if there is one.")]
PresetOption = Annotated[
    Preset | None,
    typer.Option(help="tiny: SmolLM2 135M. small: Qwen2.5-Coder 0.5B. laptop: the 1.5B."),
]
Target = Annotated[
    str | None, typer.Option(help="Model that answers: a catalogue name, file:PATH or hf:ORG/REPO/FILE.gguf.")
]
Draft = Annotated[str | None, typer.Option(help="Model that drafts for it, or 'none'.")]
Head = Annotated[str | None, typer.Option(help="Draft head: auto (the one that is shipped), none, or a directory.")]
ContextLength = Annotated[int | None, typer.Option(help="Tokens of prompt and answer together.")]
Threads = Annotated[int | None, typer.Option(help="Inference threads; the usable cores by default.")]
CacheDir = Annotated[Path | None, typer.Option(help="Where models are kept; the user's cache by default.")]


@app.command(
    epilog="Example: edge-agent serve --preset laptop --port 9000. Beyond loopback a key is needed: "
    "edge-agent serve --host 0.0.0.0 --api-key SECRET."
)
def serve(
    config: Config = None,
    preset: PresetOption = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 takes a free one.")] = None,
    api_key: Annotated[list[str] | None, typer.Option(help="Key that callers need; may be repeated.")] = None,
    admin_key: Annotated[str | None, typer.Option(help="Key that may change policy and device.")] = None,
    target: Target = None,
    draft: Draft = None,
    head: Head = None,
    context_length: ContextLength = None,
    threads: Threads = None,
    max_running: Annotated[int | None, typer.Option(help="Requests answered side by side.")] = None,
    max_waiting: Annotated[int | None, typer.Option(help="Requests that may queue.")] = None,
    max_gamma: Annotated[int | None, typer.Option(help="Most draft tokens a round; 0 never drafts.")] = None,
    sensors: Annotated[
        str | None, typer.Option(help="auto, push, simulated:PROFILE or replay:FILE: where readings come from.")
    ] = None,
    policy: Annotated[str | None, typer.Option(help="auto, phone, board or server: whose limits apply.")] = None,
    objective: Annotated[str | None, typer.Option(help="latency, energy or balanced.")] = None,
    cloud_url: Annotated[str | None, typer.Option(help="Cloud verifier to hand over to.")] = None,
    fleet: Annotated[
        bool | None,
        typer.Option("--fleet", help="Report to it how the device fares: heat, battery, mode, speed; no text."),
    ] = None,
    cache_dir: CacheDir = None,
) -> None:
    """Serve the OpenAI API on this device.

    The first start fetches and builds the models; later ones take seconds. Ctrl-C lets running answers finish, a second
    one doesn't.
    """
    flags = {name: value for name, value in locals().items() if name != "api_key"}
    settings = load_settings({**flags, "api_keys": tuple(api_key or ())})

    from edge_agent.serve import serve_until_stopped

    serve_until_stopped(settings)


@app.command(epilog="In the chat: /reset starts anew, /quit or Ctrl-D leaves, Ctrl-C stops an answer.")
def chat(
    url: Annotated[
        str | None, typer.Option(help="A running agent, e.g. http://127.0.0.1:8080; else models are loaded here.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="Key for the running agent.", envvar="EDGE_AGENT_KEY")] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 always takes the likeliest token.")] = 0.7,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer.")] = None,
    config: Config = None,
    preset: PresetOption = None,
    target: Target = None,
    draft: Draft = None,
    head: Head = None,
    context_length: ContextLength = None,
    threads: Threads = None,
    cache_dir: CacheDir = None,
) -> None:
    """Chat in the terminal, with the speed and the acceptance rate of each answer."""
    from edge_agent.console import ChatOptions, chat_with_agent, chat_with_engine

    options = ChatOptions(system, temperature, max_tokens)
    if url is not None:
        chat_with_agent(url, api_key, options)
        return
    chat_with_engine(_settings(config, preset, target, draft, head, context_length, threads, cache_dir), options)


app.command(epilog="Example: edge-agent calibrate --preset laptop.")(calibrate)
app.command(epilog="Example: edge-agent bench --preset tiny --repeats 5 --report bench.html.")(bench)
app.command(epilog="Example: edge-agent sustain --minutes 10 --profile phone --plot sustain.png.")(sustain)
app.command(
    epilog="Example: edge-agent distill qwen2.5-coder-0.5b-instruct --output my-head --prompts my-prompts.jsonl."
)(distill)
app.command(epilog="Example: edge-agent simulate --curve policy.json --plot speedup.svg.")(simulate)


@models_app.command("list")
def list_models(cache_dir: CacheDir = None) -> None:
    """The models that come by name, and which of them are here."""
    from edge_agent.model_commands import print_models

    print_models(cache_dir)


@models_app.command("pull", epilog="Example: edge-agent models pull qwen2.5-coder-0.5b-instruct --role draft.")
def pull_model(
    model: Annotated[str, typer.Argument(help="A catalogue name, file:PATH or hf:ORG/REPO/FILE.gguf.")],
    role: Annotated[str, typer.Option(help="target or draft: a draft is built smaller and quicker.")] = "target",
    cache_dir: CacheDir = None,
) -> None:
    """Fetch and build a model now, so that no start has to. Goes on where it was interrupted."""
    from edge_agent.model_commands import pull_with_progress

    typer.echo(pull_with_progress(model, role, cache_dir))


@models_app.command("info")
def model_info(
    model: Annotated[
        str, typer.Argument(help="A catalogue name, or a directory: of a built model, or of a draft head.")
    ],
    cache_dir: CacheDir = None,
) -> None:
    """What is known of a model: source, hash, licence, and how it was built if it was."""
    from edge_agent.model_commands import print_model

    print_model(model, cache_dir)


def _settings(
    config: Path | None,
    preset: Preset | None,
    target: str | None,
    draft: str | None,
    head: str | None,
    context_length: int | None,
    threads: int | None,
    cache_dir: Path | None,
) -> EdgeSettings:
    flags: dict[str, Any] = dict(locals())
    return load_settings(flags)
