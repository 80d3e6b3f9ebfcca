"""What edge and cloud share. Imports neither of them."""

import os

# Since 1.29 ONNX Runtime reports home on Linux unless this is set before it is first imported. Every module of ours
# that imports it comes through here first.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
