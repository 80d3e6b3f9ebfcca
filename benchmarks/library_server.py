"""Engines that come as libraries, behind the same HTTP as the others, so that all are measured at the socket.

    python -m benchmarks.library_server genai --model DIR --port N [--lookup]      # ONNX Runtime GenAI
    python -m benchmarks.library_server openvino --model DIR --gguf FILE --port N [--lookup]

Prompts are made by our template and tokenizer (those of --model), so that every engine reads the same ids.
"""

from __future__ import annotations

import argparse
import json
import queue
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, Protocol

from shared.chat_template import ChatTemplate
from shared.detokenizer import IncrementalDetokenizer
from shared.tokenizer import Tokenizer

CONTEXT = 2048
LOOKUP_NGRAM, LOOKUP_DRAFT = 3, 8
"""Length of the runs that are looked up, and the longest draft."""


class Engine(Protocol):
    """Something that decodes greedily."""

    def generate(self, prompt: Sequence[int], max_tokens: int) -> Iterator[int]:
        """The answer's ids, each as soon as it is known; a stop id may be the last."""


class GenaiEngine:
    """ONNX Runtime GenAI on a directory of ours, its cache one buffer for past and present."""

    def __init__(self, directory: Path, lookup: bool) -> None:
        """lookup: its own n-gram drafts, with the length adapted and pauses where they don't pay."""
        import onnxruntime_genai

        self._genai = onnxruntime_genai
        self._model = onnxruntime_genai.Model(str(directory))
        self._lookup = lookup

    def generate(self, prompt: Sequence[int], max_tokens: int) -> Iterator[int]:
        """See `Engine.generate`."""
        params = self._genai.GeneratorParams(self._model)
        params.set_search_options(
            max_length=min(len(prompt) + max_tokens, CONTEXT), do_sample=False, past_present_share_buffer=True
        )
        if self._lookup:
            params.set_speculative_options(
                ngram_size=LOOKUP_NGRAM, max_draft_tokens=LOOKUP_DRAFT, min_adaptive_k=1, cooldown=True
            )
        generator = self._genai.Generator(self._model, params)
        generator.append_tokens(list(prompt))
        while not generator.is_done():
            generator.generate_next_token()
            yield int(generator.get_next_tokens()[0])


class OpenVinoEngine:
    """OpenVINO GenAI on a GGUF."""

    def __init__(self, gguf: Path, lookup: bool, threads: int) -> None:
        import openvino
        import openvino_genai

        self._genai, self._tensor = openvino_genai, openvino.Tensor
        options = {"prompt_lookup": True} if lookup else {}
        self._pipeline = openvino_genai.LLMPipeline(str(gguf), "CPU", INFERENCE_NUM_THREADS=threads, **options)
        self._lookup = lookup

    def generate(self, prompt: Sequence[int], max_tokens: int) -> Iterator[int]:
        """See `Engine.generate`."""
        import numpy as np

        config = self._genai.GenerationConfig()
        config.max_new_tokens, config.do_sample, config.apply_chat_template = max_tokens, False, False
        if self._lookup:
            config.num_assistant_tokens, config.max_ngram_size = LOOKUP_DRAFT, LOOKUP_NGRAM
        ids = np.array([prompt], np.int64)
        inputs = self._genai.TokenizedInputs(self._tensor(ids), self._tensor(np.ones_like(ids)))
        tokens: queue.Queue[int | None] = queue.Queue()
        going_on = self._genai.StreamingStatus.RUNNING

        class Collector(self._genai.StreamerBase):  # type: ignore[misc, name-defined]
            def write(self, token: int | list[int]) -> Any:
                for each in token if isinstance(token, list) else [token]:
                    tokens.put(each)
                return going_on

            def end(self) -> None:
                tokens.put(None)

        worker = threading.Thread(target=self._pipeline.generate, args=(inputs, config, Collector()))
        worker.start()
        yield from iter(tokens.get, None)
        worker.join()


class LibraryServer(HTTPServer):
    """One engine; one request at a time."""

    def __init__(self, port: int, engine: Engine, tokenizer: Tokenizer) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.engine = engine
        self.tokenizer = tokenizer
        self.template = ChatTemplate(tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token)


class Handler(BaseHTTPRequestHandler):
    """`GET /health`, and `POST /v1/chat/completions` as a stream."""

    protocol_version = "HTTP/1.1"
    server: LibraryServer

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        tokenizer = self.server.tokenizer
        prompt = self.server.template.encode(tokenizer, body["messages"])
        detokenizer, num_tokens = IncrementalDetokenizer(tokenizer), 0
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for token in self.server.engine.generate(prompt, body["max_tokens"]):
            if token in tokenizer.eos_ids:
                break
            num_tokens += 1
            self._send([{"index": 0, "delta": {"content": detokenizer.push(token)}}])
        self._send([{"index": 0, "delta": {"content": detokenizer.flush()}}])
        self._send([], usage={"prompt_tokens": len(prompt), "completion_tokens": num_tokens})
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def _send(self, choices: list[dict[str, Any]], **fields: Any) -> None:
        self.wfile.write(f"data: {json.dumps({'choices': choices, **fields})}\n\n".encode())
        self.wfile.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=["genai", "openvino"])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--lookup", action="store_true", help="the engine's own n-gram drafts")
    arguments = parser.parse_args()
    engine: Engine
    if arguments.engine == "genai":
        engine = GenaiEngine(arguments.model, arguments.lookup)
    else:
        engine = OpenVinoEngine(arguments.gguf, arguments.lookup, arguments.threads)
    LibraryServer(arguments.port, engine, Tokenizer.from_directory(arguments.model)).serve_forever()


if __name__ == "__main__":
    main()
