"""llama.cpp's own tokenizer, reached through the server in the `xllamacpp` wheel."""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import Any

import xllamacpp


class LlamaReference:
    """Answers with llama.cpp's ids for a GGUF. The server ends with the object."""

    def __init__(self, gguf_path: Path) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = str(gguf_path)
        params.n_ctx = 256
        params.n_parallel = 1
        params.warmup = False
        params.fit_params = False
        params.verbosity = 0
        params.port = 0
        self._server = xllamacpp.Server(params)
        self._connection = http.client.HTTPConnection(self._server.listening_address.removeprefix("http://"))

    def encode(self, text: str, *, allow_special: bool = False, add_bos: bool = False) -> list[int]:
        body = {"content": text, "parse_special": allow_special, "add_special": add_bos}
        return list(self._post("/tokenize", body)["tokens"])

    def apply_template(self, messages: list[dict[str, Any]]) -> str:
        return str(self._post("/apply-template", {"messages": messages})["prompt"])

    def close(self) -> None:
        self._connection.close()
        del self._server

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        self._connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        response = self._connection.getresponse()
        content = json.loads(response.read())
        assert response.status == 200, content
        return content
