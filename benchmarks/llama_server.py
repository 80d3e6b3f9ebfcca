"""llama.cpp's own HTTP server as a process of its own: `python -m benchmarks.llama_server --gguf FILE --port N`."""

from __future__ import annotations

import argparse
import signal

import xllamacpp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gguf", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--slots", type=int, default=1)
    parser.add_argument("--draft", help="GGUF of a draft model")
    parser.add_argument("--speculative", default="none", help="none, draft-simple, ngram-simple, ngram-mod, …")
    arguments = parser.parse_args()
    params = xllamacpp.CommonParams()
    params.model.path = arguments.gguf
    params.port = arguments.port
    params.n_ctx = arguments.context * arguments.slots
    params.n_parallel = arguments.slots
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = arguments.threads
    params.verbosity = 1
    if arguments.speculative != "none":
        name = "COMMON_SPECULATIVE_TYPE_" + arguments.speculative.upper().replace("-", "_")
        params.speculative.types = [getattr(xllamacpp.common_speculative_type, name)]
    if arguments.draft:
        params.speculative.draft.mparams.path = arguments.draft
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    main()
