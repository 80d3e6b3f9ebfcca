"""A package index on loopback that serves wheels made on the spot, and can stop in the middle of one."""

from __future__ import annotations

import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def make_wheel(directory: Path, name: str, version: str, member: str, content: bytes) -> Path:
    """A wheel that pip accepts, with one file in it."""
    stem = f"{name.replace('-', '_')}-{version}"
    path = directory / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
        archive.writestr(f"{stem}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{stem}.dist-info/RECORD", "")
    return path


class PackageIndex:
    """Serves the wheels of a directory. `stall_after` bytes of `stall_name` it waits until `go_on` is set."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.downloads: list[str] = []
        self.stall_name: str | None = None
        self.stall_after = 0
        self.stalled = threading.Event()
        self.go_on = threading.Event()
        self.url = ""

    def page(self, package: str) -> bytes:
        wheels = sorted(self.directory.glob(f"{package.replace('-', '_')}-*.whl"))
        links = (f'<a href="/files/{wheel.name}">{wheel.name}</a>' for wheel in wheels)
        return f"<!DOCTYPE html><html><body>{''.join(links)}</body></html>".encode()

    def handler(index: PackageIndex) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                kind, name = self.path.strip("/").split("/", 1)
                content = index.page(name) if kind == "simple" else (index.directory / name).read_bytes()
                self.send_response(200)
                self.send_header("Content-Type", "text/html" if kind == "simple" else "application/octet-stream")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if kind == "files":
                    index.downloads.append(name)
                    if name == index.stall_name:
                        self.wfile.write(content[: index.stall_after])
                        self.wfile.flush()
                        index.stalled.set()
                        index.go_on.wait()
                        content = content[index.stall_after :]
                try:
                    self.wfile.write(content)
                except OSError:
                    return

            def log_message(self, format: str, *args: object) -> None:
                return

        return Handler


@contextmanager
def serve_index(directory: Path) -> Iterator[PackageIndex]:
    """The index, running on a free port."""
    index = PackageIndex(directory)
    server = ThreadingHTTPServer(("127.0.0.1", 0), index.handler())
    server.daemon_threads = True
    index.url = f"http://127.0.0.1:{server.server_port}/simple"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield index
    finally:
        index.go_on.set()
        server.shutdown()
        server.server_close()
        thread.join()
