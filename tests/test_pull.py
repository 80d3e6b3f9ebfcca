"""Fetching and building: interrupted anywhere it goes on, nothing wrong is ever used, every failure names its cause."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from shared.errors import ConfigError, DiskSpaceError, DownloadError, ModelFileError
from shared.models import cache as cache_module
from shared.models.cache import ModelCache
from shared.models.catalogue import CatalogueModel
from shared.models.directory import open_model_directory
from shared.models.pull import fetch_gguf, pull
from tests.package_index import PackageIndex, make_wheel, serve_index
from tests.tiny_gguf import sentencepiece_vocabulary, write_tiny_gguf

VERSION = "1.0"


@pytest.fixture
def cache(tmp_path: Path) -> ModelCache:
    return ModelCache(tmp_path / "cache")


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny_gguf(tmp_path / "tiny.gguf", sentencepiece_vocabulary("hello world, hello again\n" * 9, 290))


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PackageIndex]:
    """The only index that pip knows."""
    directory = tmp_path / "index"
    directory.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_RETRIES", "0")
    with serve_index(directory) as served:
        monkeypatch.setenv("PIP_INDEX_URL", served.url)
        yield served


def halves(content: bytes, index: PackageIndex) -> CatalogueModel:
    """A model of these bytes, as two wheels."""
    middle = len(content) // 2
    for number, part in enumerate((content[:middle], content[middle:]), start=1):
        make_wheel(index.directory, f"tiny-part{number}", VERSION, f"tiny_part{number}/data/part.bin", part)
    return CatalogueModel(
        name="tiny",
        wheels=(f"tiny-part1=={VERSION}", f"tiny-part2=={VERSION}"),
        member="*/data/*.bin",
        sha256=hashlib.sha256(content).hexdigest(),
        size=len(content),
        licence="Apache-2.0",
        roles=("target", "draft"),
        family="llama",
        context_length=256,
    )


class Heard:
    """A listener that keeps the stages, and may do something at one."""

    def __init__(self, at: str = "", action: Any = None) -> None:
        self.stages: list[str] = []
        self.most: dict[str, float] = {}
        self._at, self._action = at, action

    def __call__(self, stage: str, done: float, total: float) -> None:
        assert total == 0 or 0 <= done <= total
        if stage not in self.stages:
            self.stages.append(stage)
        self.most[stage] = max(done, self.most.get(stage, 0.0))
        if self._action is not None and self._at in stage and done > 0:
            self._action()


def interrupt() -> None:
    raise KeyboardInterrupt


def files_below(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


def test_wheels_become_a_model_that_loads(tiny: Path, index: PackageIndex, cache: ModelCache) -> None:
    heard = Heard()
    model = halves(tiny.read_bytes(), index)
    directory = pull(model, cache, progress=heard)
    assert open_model_directory(directory).manifest is not None
    assert cache.gguf_path("tiny").read_bytes() == tiny.read_bytes()
    assert files_below(cache.root / "gguf") == {"tiny.gguf"}
    assert heard.stages == ["downloading tiny", "unpacking tiny", "building tiny"]
    shutil.rmtree(index.directory)
    assert pull(model, cache, progress=heard) == directory


def test_two_roles_are_two_directories(tiny: Path, cache: ModelCache) -> None:
    assert pull(str(tiny), cache, role="target") != pull(str(tiny), cache, role="draft")


def test_what_was_downloaded_is_not_downloaded_again(tiny: Path, index: PackageIndex, cache: ModelCache) -> None:
    model = halves(tiny.read_bytes(), index)
    second = index.directory / f"tiny_part2-{VERSION}-py3-none-any.whl"
    second.rename(second.with_suffix(".away"))
    with pytest.raises(DownloadError, match=rf"tiny-part2=={VERSION} could not be downloaded: .*No matching") as caught:
        fetch_gguf(model, cache)
    assert "WARNING" not in str(caught.value)
    second.with_suffix(".away").rename(second)
    fetch_gguf(model, cache)
    assert sorted(index.downloads) == [f"tiny_part{n}-{VERSION}-py3-none-any.whl" for n in (1, 2)]


def test_an_interrupted_download_leaves_no_process_and_no_half_file(index: PackageIndex, cache: ModelCache) -> None:
    content = random.Random(0).randbytes(4_000_000)
    model = halves(content, index)
    index.stall_name = f"tiny_part2-{VERSION}-py3-none-any.whl"
    index.stall_after = 1_500_000

    def interrupt_in_the_second_wheel(stage: str, done: float, total: float) -> None:
        if done > 3_000_000 and index.stalled.wait(30):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_gguf(model, cache, progress=interrupt_in_the_second_wheel)
    assert index.stalled.is_set()
    assert not [child for child in psutil.Process().children(recursive=True) if "pip" in child.cmdline()]
    assert files_below(cache.root / "gguf") == {f"tiny.parts/tiny_part1-{VERSION}-py3-none-any.whl"}
    index.go_on.set()
    assert fetch_gguf(model, cache).read_bytes() == content
    assert index.downloads.count(f"tiny_part1-{VERSION}-py3-none-any.whl") == 1


def test_an_interrupted_build_leaves_nothing_that_counts(tiny: Path, cache: ModelCache) -> None:
    with pytest.raises(KeyboardInterrupt):
        pull(str(tiny), cache, progress=Heard("building", interrupt))
    assert not [name for name in files_below(cache.root / "onnx") if name.endswith((".onnx", ".json", ".data"))]
    assert open_model_directory(pull(str(tiny), cache)).manifest is not None


def test_wrong_bytes_are_named_and_removed_so_that_a_retry_can_succeed(
    tiny: Path, index: PackageIndex, cache: ModelCache
) -> None:
    model = halves(tiny.read_bytes(), index)
    good = (index.directory / f"tiny_part2-{VERSION}-py3-none-any.whl").read_bytes()
    make_wheel(index.directory, "tiny-part2", VERSION, "tiny_part2/data/part.bin", b"something else")
    with pytest.raises(ModelFileError, match=rf"tiny\.gguf: expected sha256 {model.sha256}, found [0-9a-f]{{64}}"):
        fetch_gguf(model, cache)
    assert files_below(cache.root / "gguf") == set()
    (index.directory / f"tiny_part2-{VERSION}-py3-none-any.whl").write_bytes(good)
    assert fetch_gguf(model, cache).read_bytes() == tiny.read_bytes()


@pytest.mark.parametrize("damage", ["cut", "no such member"])
def test_a_damaged_wheel_is_named_and_removed(tiny: Path, index: PackageIndex, cache: ModelCache, damage: str) -> None:
    model = halves(tiny.read_bytes(), index)
    parts = cache.parts_path("tiny")
    parts.mkdir(parents=True)
    if damage == "cut":
        whole = index.directory / f"tiny_part1-{VERSION}-py3-none-any.whl"
        (parts / whole.name).write_bytes(whole.read_bytes()[:-500])
    else:
        make_wheel(parts, "tiny-part1", VERSION, "tiny_part1/README", b"")
    with pytest.raises(ModelFileError, match=r"tiny_part1-1\.0-py3-none-any\.whl"):
        fetch_gguf(model, cache)
    assert fetch_gguf(model, cache).read_bytes() == tiny.read_bytes()


def test_a_truncated_or_altered_gguf_is_found(tiny: Path, index: PackageIndex, cache: ModelCache) -> None:
    model = halves(tiny.read_bytes(), index)
    path = fetch_gguf(model, cache)
    content = path.read_bytes()
    path.write_bytes(content[:-1000])
    with pytest.raises(ModelFileError, match=r"tiny\.gguf has [\d,]+ bytes, expected"):
        fetch_gguf(model, cache)
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ModelFileError, match=r"tiny\.gguf is altered: expected sha256"):
        fetch_gguf(model, cache)
    path.write_bytes(content)
    assert fetch_gguf(model, cache) == path


def test_a_truncated_or_altered_model_is_found(tiny: Path, cache: ModelCache) -> None:
    directory = pull(str(tiny), cache)
    weights = max(directory.iterdir(), key=lambda path: path.stat().st_size)
    content = weights.read_bytes()
    for wrong in (content[:-100], content[:-1] + bytes([content[-1] ^ 1])):
        weights.write_bytes(wrong)
        with pytest.raises(ModelFileError, match=f"{weights.name}.*remove .* to have it built again"):
            pull(str(tiny), cache)
    shutil.rmtree(directory)
    assert pull(str(tiny), cache) == directory


def test_another_source_under_the_same_name_is_another_model(tiny: Path, cache: ModelCache) -> None:
    first = pull(str(tiny), cache)
    write_tiny_gguf(tiny, sentencepiece_vocabulary("quite another text\n" * 9, 290))
    assert pull(str(tiny), cache) != first


def test_a_ready_directory_is_taken_as_it_is(tiny: Path, cache: ModelCache, tmp_path: Path) -> None:
    directory = tmp_path / "mine"
    shutil.copytree(pull(str(tiny), cache), directory)
    assert pull(str(directory), ModelCache(tmp_path / "unused")) == directory
    assert not (tmp_path / "unused").exists()
    with pytest.raises(ModelFileError):
        fetch_gguf(str(directory), cache)


def test_nothing_is_begun_without_room(
    tiny: Path, index: PackageIndex, cache: ModelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = halves(tiny.read_bytes(), index)
    room = shutil.disk_usage(tiny.parent)._replace(free=1234)
    with monkeypatch.context() as patch:
        patch.setattr(cache_module.shutil, "disk_usage", lambda path: room)
        with pytest.raises(DiskSpaceError, match=rf"download of tiny needs {2 * model.size:,} bytes .* 1,234 are free"):
            fetch_gguf(model, cache)
        assert index.downloads == []
        with pytest.raises(DiskSpaceError, match=r"build of tiny-[0-9a-f]+ needs [\d,]+ bytes .* 1,234 are free"):
            pull(str(tiny), cache)
    assert pull(model, cache).is_dir()


def test_of_two_that_want_the_same_model_one_makes_it(tiny: Path, index: PackageIndex, cache: ModelCache) -> None:
    model = halves(tiny.read_bytes(), index)
    index.stall_name = f"tiny_part1-{VERSION}-py3-none-any.whl"
    index.stall_after = 1000
    waiting = threading.Event()
    found: list[Path] = []

    def second(stage: str, done: float, total: float) -> None:
        assert stage == "waiting for another process that prepares tiny"
        waiting.set()

    threads = [threading.Thread(target=lambda: found.append(fetch_gguf(model, cache)))]
    threads[0].start()
    assert index.stalled.wait(60)
    threads.append(threading.Thread(target=lambda: found.append(fetch_gguf(model, cache, progress=second))))
    threads[1].start()
    assert waiting.wait(60)
    index.go_on.set()
    for thread in threads:
        thread.join()
    assert found == [cache.gguf_path("tiny")] * 2
    assert index.downloads.count(index.stall_name) == 1


def test_an_unknown_reference_touches_nothing(cache: ModelCache) -> None:
    with pytest.raises(ConfigError):
        pull("no-such-model", cache)
    assert not cache.root.exists()


def test_the_real_model_comes_by_name(smollm2_directory: Path) -> None:
    manifest = open_model_directory(smollm2_directory).manifest
    assert manifest is not None
    assert manifest.source_sha256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


class HubHandler(BaseHTTPRequestHandler):
    """One file of one repository, as the hub serves it."""

    content = b""

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        if self.path != "/org/repo/resolve/main/tiny.gguf":
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("ETag", f'"{hashlib.sha256(self.content).hexdigest()}"')
        self.send_header("Content-Length", str(len(self.content)))
        self.end_headers()
        if with_body:
            self.wfile.write(self.content)

    def log_message(self, format: str, *args: object) -> None:
        return


@pytest.fixture
def hub(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadingHTTPServer]:
    handler = type("Handler", (HubHandler,), {"content": tiny.read_bytes()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_model_comes_from_the_hub(hub: ThreadingHTTPServer, tiny: Path, cache: ModelCache) -> None:
    heard = Heard()
    path = fetch_gguf("hf:org/repo/tiny.gguf", cache, progress=heard)
    assert path.read_bytes() == tiny.read_bytes()
    assert heard.most["downloading org/repo/tiny.gguf"] == tiny.stat().st_size
    directory = pull("hf:org/repo/tiny.gguf", cache)
    assert open_model_directory(directory).manifest is not None
    hub.RequestHandlerClass.content = b""  # type: ignore[attr-defined]  # From here on the file is found, not fetched.
    assert pull("hf:org/repo/tiny.gguf", cache) == directory


def test_a_hub_that_has_no_such_file_is_a_download_error(hub: ThreadingHTTPServer, cache: ModelCache) -> None:
    with pytest.raises(DownloadError, match=r"hf:org/repo/other\.gguf could not be downloaded"):
        fetch_gguf("hf:org/repo/other.gguf", cache)


def test_a_hub_that_can_not_be_reached_is_a_download_error(cache: ModelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DownloadError, match=r"hf:org/repo/tiny\.gguf could not be downloaded: .*refused"):
        fetch_gguf("hf:org/repo/tiny.gguf", cache)
