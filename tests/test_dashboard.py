"""/dashboard in a real Chromium: the gauges, the chat and its colours, the key, and that the page runs nothing but its own."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from playwright.sync_api import BrowserContext, Page, expect

from browser import chromium, executable
from serving import Running, events, serving
from sparsespec.config import ServerConfig

pytestmark = pytest.mark.skipif(os.environ.get("SPARSESPEC_NO_BROWSER") == "1", reason="SPARSESPEC_NO_BROWSER=1")

SMALL = {"max_num_seqs": 2, "max_model_len": 4096}


class Visit:
    """The page, and what it complained of and asked for."""

    def __init__(self, context: BrowserContext, url: str) -> None:
        self.page: Page = context.new_page()
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda m: self.errors.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda e: self.errors.append(str(e)))
        self.page.on("dialog", lambda d: (self.errors.append(f"dialog: {d.message}"), d.dismiss()))
        self.page.on("request", lambda r: self.requests.append(r.url))
        self.page.goto(f"{url}/dashboard")

    def say(self, text: str, max_tokens: int = 40, *, wait: bool = True) -> None:
        """Send a message greedily."""
        self.page.get_by_label("Temperature").fill("0")
        self.page.get_by_label("Most tokens").fill(str(max_tokens))
        self.page.get_by_label("Message").fill(text)
        self.page.get_by_label("Message").press("Enter")
        if wait:
            expect(self.page.get_by_role("button", name="Stop")).to_be_disabled()

    def spans(self, answer: int = -1) -> list[tuple[str, str]]:
        """Colour and text of the parts of an answer."""
        parts = self.page.locator(".assistant").nth(answer).locator(".content-text > span").all()
        return [(p.get_attribute("class") or "", p.text_content() or "") for p in parts]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(**SMALL) as running:
        yield running


@pytest.fixture(scope="module")
def context() -> Iterator[BrowserContext]:
    with chromium(viewport={"width": 1200, "height": 760}) as opened:
        yield opened


@pytest.fixture
def visit(server: Running, context: BrowserContext) -> Iterator[Visit]:
    """The page of a server without keys; at the end it has complained of nothing and asked nobody else."""
    found = Visit(context, server.url)
    yield found
    found.page.close()
    assert found.errors == []
    assert all(url.startswith((server.url, "data:")) for url in found.requests)


def answer(server: Running, messages: list[Any], max_tokens: int = 40) -> dict[str, Any]:
    found: dict[str, Any] = server.post("/v1/chat/completions", {
        "messages": messages, "temperature": 0, "max_tokens": max_tokens, "return_draft_spans": True,
        "return_speculation": True}).json()
    return found


def test_colours_are_the_answers_spans(visit: Visit, server: Running) -> None:
    visit.say("Why is the sky blue?")
    first = [{"role": "user", "content": "Why is the sky blue?"}]
    said = answer(server, first)
    choice, drafts = said["choices"][0], said["speculation"]
    content, spans = choice["message"]["content"], visit.spans()
    assert "".join(text for _, text in spans) == content
    assert [(len(text), kind == "draft") for kind, text in spans] == [tuple(s) for s in choice["draft_spans"]["content"]]
    assert {kind for kind, _ in spans} == {"draft", "target"}
    note = visit.page.locator(".assistant .note").inner_text()
    assert "40 tokens · " in note
    assert f"{drafts['num_accepted_tokens']} of {drafts['num_draft_tokens']} drafts accepted" in note
    visit.say("And at night?")
    again = answer(server, [*first, {"role": "assistant", "content": content}, {"role": "user", "content": "And at night?"}])
    assert "".join(text for _, text in visit.spans()) == again["choices"][0]["message"]["content"]
    colours = {kind: visit.page.locator(f".content-text .{kind}").first.evaluate("e => getComputedStyle(e).backgroundColor")
               for kind in ("draft", "target")}
    assert colours["draft"] != colours["target"]


def test_gauges_move_and_stop_aborts(visit: Visit, server: Running) -> None:
    page = visit.page
    expect(page.locator("#state")).to_have_text("live")
    expect(page.locator("#running")).to_have_text("0")
    visit.say("Go on.", 3000, wait=False)
    expect(page.locator("#running")).to_have_text("1")
    expect(page.locator("#speed")).not_to_have_text("0.0")
    expect(page.locator("#device")).to_have_text(re.compile(r"^(0\.[1-9]|[1-9]).* % of 1,024 pages"))
    expect(page.locator("#verify")).not_to_have_text("0.0")
    expect(page.locator("#draft")).not_to_have_text("0.0")
    expect(page.locator("#c-accepted")).to_have_attribute("aria-label", re.compile(r"1: \d+ %.*4: \d+ %"))
    drawn = "c => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some(x => x)"
    assert all(page.locator(f"#c-{name}").evaluate(drawn) for name in ("speed", "requests", "pools", "rows", "accepted"))
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".assistant .note")).to_contain_text("ended by stop button")
    server.wait_idle(5)
    assert "".join(text for _, text in visit.spans())
    expect(page.locator("#running")).to_have_text("0")


def test_load_of_others_is_shown(visit: Visit, server: Running) -> None:
    body = {"messages": [{"role": "user", "content": "Go on."}], "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with ExitStack() as others:
        for _ in range(SMALL["max_num_seqs"]):
            others.enter_context(httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=60))
        visit.say("Hi", wait=False)
        expect(visit.page.locator("#running")).to_have_text("2")
        expect(visit.page.locator("#waiting")).to_have_text("1")
    expect(visit.page.get_by_role("button", name="Stop")).to_be_disabled()
    assert visit.spans()


def test_a_missing_browser_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RuntimeError, match="make browser"):
        executable()


def test_text_is_never_markup(visit: Visit) -> None:
    nasty = "<script>alert(1)</script><img src=x onerror=alert(2)><b>bold</b>"
    visit.say(nasty)
    assert visit.page.locator(".user .text").last.text_content() == nasty
    visit.page.evaluate("""text => {
        const answer = new Answer();
        answer.add("content", text, [[3, true], [text.length - 3, false]]);
        answer.add("reasoning", text);
    }""", nasty)
    assert visit.page.locator(".assistant .content-text").last.text_content() == nasty
    assert visit.page.locator("#log script, #log img, #log b").count() == 0


def test_errors_are_told_and_the_message_stays(server: Running, context: BrowserContext) -> None:
    visit = Visit(context, server.url)
    visit.page.get_by_label("Message").fill("Hi")
    visit.page.get_by_label("Most tokens").fill("-1")
    visit.page.get_by_label("Most tokens").evaluate("e => e.removeAttribute('min')")
    visit.page.get_by_role("button", name="Send").click()
    expect(visit.page.get_by_role("alert")).to_contain_text("max_tokens")
    expect(visit.page.get_by_label("Message")).to_have_value("Hi")
    assert visit.page.locator(".turn").count() == 0
    visit.page.close()


def test_dark_and_narrow(visit: Visit) -> None:
    page = visit.page
    back = "() => getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(back)
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(back) != light
    visit.say("Good evening. " * 20 + "x" * 400)
    for width in (400, 700, 1200):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("() => document.documentElement.scrollWidth") <= width
    page.emulate_media(color_scheme="light")


def test_a_keyboard_is_enough(visit: Visit) -> None:
    reached = []
    for _ in range(7):
        visit.page.keyboard.press("Tab")
        reached.append(visit.page.evaluate("() => document.activeElement.id"))
    assert reached[:5] == ["log", "message", "temperature", "tokens", "send"]
    assert "clear" in reached
    assert visit.page.locator("canvas:not([role=img][aria-label])").count() == 0


def test_the_key(context: BrowserContext) -> None:
    with serving(config=ServerConfig(api_key=["s3cret-key"]), max_model_len=512) as server:
        page = server.get("/dashboard")
        assert page.status_code == 200
        assert "s3cret-key" not in page.text
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert "unsafe" not in page.headers["content-security-policy"]
        visit = Visit(context, server.url)
        key = visit.page.get_by_label("API key")
        for value in ("wrong", "s3cret-key"):
            expect(key).to_be_visible()
            expect(visit.page.get_by_role("alert")).to_contain_text("no valid API key")
            key.fill(value)
            key.press("Enter")
        expect(key).to_be_hidden()
        expect(visit.page.locator("#model")).to_contain_text("context 512")
        visit.say("Hi", 8)
        assert visit.spans()
        visit.page.reload()
        expect(visit.page.locator("#model")).to_contain_text("context 512")
        assert visit.page.evaluate("() => localStorage.length") == 0
        assert all("401" in error for error in visit.errors)
        assert len(visit.errors) == 2
        visit.page.close()


def test_reasoning_stands_apart(context: BrowserContext) -> None:
    config = ServerConfig(reasoning_parser="deepseek_r1")
    with serving(config=config, max_model_len=512) as server:
        visit = Visit(context, server.url)
        visit.say("Think.")
        said = answer(server, [{"role": "user", "content": "Think."}])["choices"][0]
        found = visit.page.locator(".reasoning-text").text_content()
        assert found == said["message"]["reasoning"]
        assert sum(n for n, _ in said["draft_spans"]["reasoning"]) == len(found)
        assert visit.errors == []
        visit.page.close()


def test_spans_only_where_they_are_asked_for(server: Running) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "stream": True}
    assert "draft_spans" not in server.post("/v1/chat/completions", body).text
    assert any("draft_spans" in c for e in events(server.post("/v1/chat/completions", {**body, "return_draft_spans": True}))[:-1]
               for c in e["choices"])
