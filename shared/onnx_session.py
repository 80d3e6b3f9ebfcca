"""Loading ONNX graphs and running them with memory that is bound to their inputs and outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnxruntime as ort
from numpy.typing import NDArray

from shared.errors import EngineError, ModelFileError

SPIN_US = 50
WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"


def load_session(
    path: Path, num_threads: int, *, graph: bytes | None = None, folder: Path | None = None
) -> ort.InferenceSession:
    """The graph with its weights, on the CPU. graph: another to run instead, over the weights in `folder`.

    Raises:
        ModelFileError: the file is missing or ONNX Runtime can't read it.
    """
    if not path.is_file():
        raise ModelFileError(f"{path} is missing")
    options = session_options(num_threads)
    if folder is not None:  # With a path ONNX Runtime follows links, with a folder it refuses them.
        options.add_session_config_entry(WEIGHTS_FOLDER, str(folder))
    try:
        return ort.InferenceSession(graph or str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime raises classes of its own that share no base.
        raise ModelFileError(f"ONNX Runtime can't load {path}: {error}") from error


def run_bound(session: ort.InferenceSession, binding: Any, name: str) -> None:
    """Run one pass. name: the model's, for the error.

    Raises:
        EngineError: ONNX Runtime failed.
    """
    try:
        session.run_with_iobinding(binding)
    except Exception as error:  # ONNX Runtime raises bare RuntimeErrors and classes of its own.
        raise EngineError(f"inference failed in {name}: {error}") from error


def bind_array(binding: Any, name: str, array: NDArray[Any]) -> None:
    """Bind an input to the array's own memory."""
    binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))


def session_options(num_threads: int) -> ort.SessionOptions:
    """Options for a decoder that shares its cores with other sessions and may stay idle for hours."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.log_severity_level = 3
    # A thread that sleeps between two matrices has to be woken 170 times a token: 7 % of it. One that spins on, as is
    # ONNX Runtime's default, fights with the other session's. So threads spin for the time between two matrices only.
    options.add_session_config_entry("session.intra_op.allow_spinning", "1")
    options.add_session_config_entry("session.intra_op.spin_duration_us", str(SPIN_US))
    # A plan of a pass's memory pays where shapes come again. Here each token brings a new one: making its plan takes a
    # tenth of the token's time.
    options.enable_mem_pattern = False
    # An arena keeps what the largest pass has needed, each session one of its own. The C library is as quick and gives
    # it back.
    options.enable_cpu_mem_arena = False
    return options
