"""The command `cloud-service`."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command line; an error of ours is one line on stderr and exit status 1."""
    # ONNX Runtime reads this once, when it is imported; it would report home otherwise.
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"

    from cloud_service.cli import app
    from shared.errors import SouschefError

    try:
        app()
    except SouschefError as error:
        print(f"cloud-service: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(1)


if __name__ == "__main__":
    main()
