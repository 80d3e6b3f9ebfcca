"""The demo page in a real browser, on a real agent with a real model."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.processes import REPOSITORY, serving

LIMIT_MS = 240_000
AXE = "axe-core@4.10.2"
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
AGENT_FLAGS = ["--preset", "tiny", "--port", "0", "--sensors", "push", "--policy", "phone"]
PHONE = {"width": 390, "height": 844}
DESKTOP = {"width": 1280, "height": 900}
TABS = ("race", "device", "explore")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("chromium is not installed (Debian's package chromium)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The accessibility checker's script (axe-core, MPL-2.0: used by this test only, never shipped)."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed: it brings axe-core")
    folder = tmp_path_factory.mktemp("axe")
    subprocess.run(["npm", "pack", "--silent", AXE], cwd=folder, check=True, capture_output=True, timeout=120)
    with tarfile.open(next(folder.glob("*.tgz"))) as package:
        script = package.extractfile("package/axe.min.js")
        assert script is not None
        return script.read().decode()


@pytest.fixture(scope="module")
def agent(smollm2_directory: Path) -> Iterator[str]:
    """An agent that believes what is pushed to it, with a phone's limits."""
    with serving("edge_agent", ["serve", *AGENT_FLAGS]) as url:
        yield url


@contextmanager
def opened(
    browser: Browser, url: str, *, size: Any = DESKTOP, theme: Any = "light", tab: str = "race"
) -> Iterator[Page]:
    """A page that must not log a single error."""
    complaints: list[str] = []
    context = browser.new_context(viewport=size, color_scheme=theme, locale="en-GB")
    context.set_default_timeout(LIMIT_MS)
    page = context.new_page()
    page.on(
        "console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None
    )
    page.on("pageerror", lambda error: complaints.append(str(error)))
    try:
        page.goto(f"{url}/#{tab}")
        expect(page.locator("#model")).not_to_be_empty(timeout=LIMIT_MS)
        yield page
    finally:
        context.close()
    assert complaints == []


def run_race(page: Page, *, tokens: str = "32", speculation: str = "on", category: str = "edit") -> dict[str, Any]:
    page.click(f"[data-category={category}]")
    page.select_option("#length", tokens)
    page.select_option("#speculation", speculation)
    page.click("#start")
    outcome = page.locator("[data-outcome]")
    expect(outcome).to_be_visible(timeout=LIMIT_MS)
    return {
        "outcome": outcome.get_attribute("data-outcome"),
        "said": outcome.inner_text(),
        "speedup": float(page.locator("[data-speedup]").get_attribute("data-speedup") or "nan"),
    }


def answer_text(page: Page, lane: str) -> str:
    """The committed text of a lane at the replay's end."""
    page.locator("#scrub").evaluate("bar => { bar.value = bar.max; bar.dispatchEvent(new Event('input')); }")
    return page.locator(f".lane.{lane} .answer").evaluate(
        "box => [...box.querySelectorAll('.token:not(.rejected)')].map(token => token.textContent).join('')"
    )


def test_race_ends_with_equal_texts_or_a_near_tie_and_a_speedup(browser: Browser, agent: str) -> None:
    with opened(browser, agent) as page:
        result = run_race(page, tokens="64")
        assert result["outcome"] in ("equal", "near_tie"), result
        assert 0.05 < result["speedup"] < 20
        same = answer_text(page, "direct") == answer_text(page, "speculative")
        assert same == (result["outcome"] == "equal")
        if result["outcome"] == "near_tie":
            assert re.search(r"near-tie", result["said"])
        assert page.locator(".lane.speculative .token.draft").count() > 0
        assert page.locator(".lane.direct .token.draft").count() == 0
        for label in ("Tokens a second", "First token", "Total", "Drafts accepted"):
            expect(page.locator("#numbers")).to_contain_text(label)


def test_rounds_can_be_stepped_through(browser: Browser, agent: str) -> None:
    with opened(browser, agent) as page:
        run_race(page)
        expect(page.locator("#round-view .place").first).to_be_visible()
        position = page.locator(".position")
        before = position.inner_text()
        page.get_by_role("button", name="Next round").click()
        assert position.inner_text() != before
        page.get_by_role("button", name="Previous round").press("Enter")
        assert position.inner_text() == before
        assert page.locator("#round-view .place.accepted").count() > 0


def test_replay_goes_back_and_forth_on_one_clock(browser: Browser, agent: str) -> None:
    with opened(browser, agent) as page:
        run_race(page)
        whole = answer_text(page, "direct")
        scrub = page.locator("#scrub")
        scrub.evaluate("bar => { bar.value = 0; bar.dispatchEvent(new Event('input')); }")
        shown = page.locator(".lane.direct .answer .token:visible")
        assert shown.count() == 0
        assert answer_text(page, "direct") == whole
        assert shown.count() > 0
        page.get_by_role("button", name="Play").click()
        expect(page.get_by_role("button", name="Pause")).to_be_visible()
        expect(page.get_by_role("button", name="Play")).to_be_visible(timeout=LIMIT_MS)


def test_private_scenario_says_that_it_stays(browser: Browser, agent: str) -> None:
    with opened(browser, agent) as page:
        page.click("[data-category=private]")
        expect(page.locator("#scenario-note")).to_contain_text("no token of it leaves this device")
        assert run_race(page, category="private", speculation="auto")["outcome"] in ("equal", "near_tie")


def test_a_race_can_be_stopped_and_another_started(browser: Browser, agent: str) -> None:
    with opened(browser, agent) as page:
        page.select_option("#length", "256")
        page.click("#start")
        expect(page.locator("#start")).to_have_text("Stop")
        page.click("#start")
        expect(page.locator("#start")).to_have_text("Race")
        assert run_race(page)["outcome"] in ("equal", "near_tie")


def quick_policy(url: str) -> None:
    """The phone's limits, without the wait that keeps a real phone from flapping."""
    changes = {"min_dwell_s": 0.2, "forecast_s": 0}
    httpx.put(f"{url}/v1/policy", json=changes, timeout=30).raise_for_status()


def start_long_answer(page: Page) -> None:
    """An answer that has begun, with drafts; the phone is cool."""
    page.click("#preset_cool")
    page.select_option("#device-length", "1900")
    page.click("#device-start")
    wait_for_mode(page, "local_speculative")


def wait_for_mode(page: Page, mode: str) -> None:
    """Until the answer's latest change is to this mode."""
    expect(page.locator("#changes tbody tr").last).to_have_attribute("data-mode", mode, timeout=LIMIT_MS)


def test_sliders_stop_speculation_within_one_answer_and_bring_it_back(browser: Browser, agent: str) -> None:
    quick_policy(agent)
    with opened(browser, agent, tab="device") as page:
        start_long_answer(page)
        page.click("#preset_warm")
        wait_for_mode(page, "local_direct")
        expect(page.locator("#reason")).to_contain_text("warm")
        expect(page.locator("[data-tile=temperature] dd")).to_contain_text("41.5")
        expect(page.locator("#ladder [aria-current]")).to_have_attribute("data-mode", "local_direct")
        page.click("#preset_cool")
        wait_for_mode(page, "local_speculative")
        expect(page.locator("#device-start")).to_have_text("Stop")
        page.click("#device-start")
        expect(page.locator("#device-start")).to_have_text("Start")


@pytest.mark.parametrize(("preset", "reason"), [("hot", "device_hot"), ("empty", "battery_critical")])
def test_sliders_move_one_answer_to_the_cloud_and_back(
    browser: Browser, smollm2_directory: Path, preset: str, reason: str
) -> None:
    """Warm or low: direct. Hot or empty: the cloud. Cool again: here, with drafts. All in one answer."""
    with (
        serving("cloud_service", ["serve", "--preset", "tiny", "--port", "0"]) as cloud,
        serving("edge_agent", ["serve", *AGENT_FLAGS, "--cloud-url", cloud]) as url,
    ):
        quick_policy(url)
        with opened(browser, url, tab="device") as page:
            expect(page.locator("[data-tile=link] dd")).to_have_text("not reached yet", timeout=LIMIT_MS)
            start_long_answer(page)
            expect(page.locator("[data-tile=link] dd")).to_have_text("reachable", timeout=LIMIT_MS)
            if preset == "hot":
                page.click("#preset_warm")
                wait_for_mode(page, "local_direct")
            page.click(f"#preset_{preset}")
            expect(page.locator(f"#changes tr[data-mode^=cloud][data-reason={reason}]").first).to_be_visible(
                timeout=LIMIT_MS
            )
            page.click("#preset_cool")
            wait_for_mode(page, "local_speculative")
            assert page.locator("#device-answer .token.cloud").count() > 0
            page.click("#device-start")


def test_private_answer_stays_when_the_phone_is_hot(browser: Browser, agent: str) -> None:
    quick_policy(agent)
    with opened(browser, agent, tab="device") as page:
        page.check("#device-private")
        start_long_answer(page)
        page.click("#preset_hot")
        wait_for_mode(page, "local_direct")
        assert page.locator("#device-answer .token.cloud").count() == 0
        page.click("#device-start")


def test_explore_finds_the_best_gamma_and_says_when_none_wins(browser: Browser, agent: str) -> None:
    with opened(browser, agent, tab="explore") as page:
        set_range(page, "alpha", "0.99")
        set_range(page, "ratio", "0")
        expect(page.locator("#explore-verdict")).to_contain_text("is best")
        assert page.locator("#chart .line").count() == 2
        set_range(page, "alpha", "0.05")
        set_range(page, "ratio", "0.9")
        expect(page.locator("#explore-verdict")).to_contain_text("no γ wins")
        assert page.locator("#curve-table tbody tr").count() >= 5


def set_range(page: Page, name: str, value: str) -> None:
    page.locator(f"#{name}").evaluate(
        "(bar, value) => { bar.value = value; bar.dispatchEvent(new Event('input', {bubbles: true})); }", value
    )


def test_chinese_and_back(browser: Browser, agent: str) -> None:
    with opened(browser, agent) as page:
        page.click("#language")
        expect(page.locator("#tab-race")).to_have_text("对比")
        assert page.locator("html").get_attribute("lang") == "zh-CN"
        page.reload()
        expect(page.locator("#tab-race")).to_have_text("对比")
        page.click("#language")
        expect(page.locator("#tab-race")).to_have_text("Race")


def test_both_languages_have_the_same_words() -> None:
    text = (REPOSITORY / "edge_agent/web/strings.js").read_text(encoding="utf-8")
    english, chinese = text.split("  zh: {")
    names = [re.findall(r"(?:^|[\s,{])(\w+): \"", part) for part in (english, chinese)]
    assert sorted(names[0]) == sorted(names[1])
    assert len(set(names[0])) == len(names[0]) > 100
    used = "".join(path.read_text(encoding="utf-8") for path in (REPOSITORY / "edge_agent/web").glob("[!s]*.js"))
    for key in set(re.findall(r"\bt\(\"(\w+)\"", used)):
        assert key in names[0]


def test_tabs_are_worked_by_keyboard(browser: Browser, agent: str) -> None:
    with opened(browser, agent) as page:
        page.locator("#tab-race").focus()
        page.keyboard.press("ArrowRight")
        expect(page.locator("#device")).to_be_visible()
        expect(page.locator("#tab-device")).to_be_focused()
        page.keyboard.press("ArrowLeft")
        expect(page.locator("#race")).to_be_visible()
        expect(page.locator("#device")).to_be_hidden()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_axe_finds_nothing_serious(browser: Browser, agent: str, axe: str, size: Any, theme: Any) -> None:
    with opened(browser, agent, size=size, theme=theme) as page:
        run_race(page)
        answer_text(page, "direct")
        for tab in TABS:
            page.click(f"#tab-{tab}")
            if tab == "device":
                page.select_option("#device-length", "128")
                page.click("#device-start")
                expect(page.locator("#changes tbody tr").first).to_be_visible(timeout=LIMIT_MS)
                expect(page.locator("#device-start")).to_have_text("Start", timeout=LIMIT_MS)
            page.evaluate(f"() => {{ {axe} }}")
            found = page.evaluate("() => axe.run(document)")
            serious = [
                (fault["id"], [node["target"] for node in fault["nodes"]])
                for fault in found["violations"]
                if fault["impact"] in ("serious", "critical")
            ]
            assert serious == [], (tab, serious)
            assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]


def test_page_and_its_parts_come_with_a_strict_policy(agent: str) -> None:
    for path in ("/", "/web/app.js", "/web/style.css", "/web/icon.svg"):
        response = httpx.get(agent + path)
        assert response.status_code == 200
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("path", ["/web/..%2fapp.py", "/web/%2e%2e/app.py", "/web/app.py", "/web/nothing.js", "/web/"])
def test_nothing_beside_the_page_is_served(agent: str, path: str) -> None:
    assert httpx.get(agent + path).status_code == 404


def test_page_needs_nothing_from_elsewhere() -> None:
    for path in (REPOSITORY / "edge_agent/web").iterdir():
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in text, path
        assert "https://" not in text, path
        assert "style=" not in text, path


def test_state_stream_sends_only_changes(agent: str) -> None:
    """One state at once; then silence while nothing happens: the page costs nothing while it only looks."""
    seen: list[dict[str, Any]] = []
    with (
        contextlib.suppress(httpx.ReadTimeout),
        httpx.stream("GET", f"{agent}/demo/state", timeout=httpx.Timeout(30, read=2)) as response,
    ):
        for line in response.iter_lines():
            if line.startswith("data: "):
                seen.append(json.loads(line[6:]))
    assert len(seen) == 1
    assert seen[0]["type"] == "state"


@pytest.mark.parametrize("body", [{}, {"prompt": ""}, {"prompt": "hi", "max_tokens": 10**6}, {"prompt": "hi", "x": 1}])
def test_bad_races_are_refused(agent: str, body: dict[str, Any]) -> None:
    response = httpx.post(f"{agent}/demo/race", json=body)
    assert response.status_code == 400
    assert "message" in response.json()["error"]


def test_page_asks_for_the_key(browser: Browser, smollm2_directory: Path) -> None:
    flags = ["--preset", "tiny", "--port", "0", "--api-key", "sesame"]
    with serving("edge_agent", ["serve", *flags]) as url:
        assert httpx.get(f"{url}/demo/facts").status_code == 401
        assert httpx.post(f"{url}/demo/race", json={"prompt": "hi"}).status_code == 401
        page = browser.new_page()
        try:
            page.goto(url)
            expect(page.locator("#key-dialog")).to_be_visible()
            page.fill("#key", "sesame")
            page.keyboard.press("Enter")
            expect(page.locator("#model")).to_have_text("smollm2-135m-instruct")
            expect(page.locator("#key-dialog")).to_be_hidden()
        finally:
            page.close()
