"""Start the application on a Ray cluster of its own: `python -m deploy.ray`."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Annotated

import typer

LOOPBACK = "127.0.0.1"
OBJECT_STORE_BYTES = 80 * 2**20
"""Ray's least. Requests and replies are small and pass it by."""


def main(
    config: Annotated[Path, typer.Argument(help="Serve's configuration.")] = Path(__file__).with_name("serve.yaml"),
    cluster: Annotated[
        str,
        typer.Option(help="ADDRESS:PORT at which other machines join. On loopback none does; port 0 takes a free one."),
    ] = f"{LOOPBACK}:0",
    cores: Annotated[int | None, typer.Option(help="Cores of this machine to use; all of them by default.")] = None,
    dashboard: Annotated[bool, typer.Option(help="Start Ray's dashboard, on loopback.")] = False,
) -> None:
    """Serve until SIGINT or SIGTERM, then let running requests end."""
    address, _, port = cluster.rpartition(":")
    if not (address and port.isdigit()):
        raise typer.BadParameter("it has to look like 10.0.0.1:6380", param_hint="--cluster")
    os.environ["RAY_GCS_SERVER_PORT"] = port
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.umask(0o077)  # Ray writes the token into a file of the user's.
    if address == LOOPBACK:
        # Else Ray would look for the network's address and listen on all: this is how it stays on loopback elsewhere.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"

    # It reads its variables when it is imported.
    import ray
    from ray.serve.scripts import run

    ray.init(
        namespace="serve",
        num_cpus=cores,
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=dashboard,
        _node_ip_address=address,
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if address != LOOPBACK:
        typer.echo(f"Other machines join with: ray start --address={ray.get_runtime_context().gcs_address}")
    run([str(config)], standalone_mode=False)


if __name__ == "__main__":
    typer.run(main)
