"""A real Chromium without a window, from the system, with nothing in its profile; and a picture of the page taken by it.

    python tests/browser.py docs/dashboard.png
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from playwright.sync_api import BrowserContext, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]


def executable() -> str:
    """The system's browser. Raises RuntimeError that says what to install."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        raise RuntimeError(f"no browser: none of {', '.join(NAMES)} is on PATH. Run `make browser`, or install the package "
                           "`chromium`; SPARSESPEC_NO_BROWSER=1 leaves these tests out")
    return found


@contextmanager
def chromium(**settings: object) -> Iterator[BrowserContext]:
    """A browser with an empty profile while open. settings: of the context."""
    with tempfile.TemporaryDirectory() as profile, sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            profile, executable_path=executable(), headless=True, args=FLAGS, **settings)  # type: ignore[arg-type]
        context.set_default_timeout(15_000)
        yield context
        context.close()


def _load(url: str, stop: threading.Event, place: int) -> None:
    topics = ["rivers", "prime numbers", "trains", "the moon", "bread", "maps"]
    while not stop.is_set():
        topic = topics[place % len(topics)]
        place += 1
        text = f"Write the sentence 'I like {topic}.' ten times, then list facts about {topic}."
        httpx.post(f"{url}/v1/chat/completions", timeout=120, json={
            "messages": [{"role": "user", "content": text}], "max_tokens": 60 + 40 * (place % 4), "temperature": 0})


def picture(path: str, seconds: float) -> None:
    """The page while SmolLM2 answers several requests and a chat."""
    from serving import serving
    from sparsespec.config import LoadConfig
    from sparsespec.loader import load_model

    stop = threading.Event()
    spec = {"num_speculative_tokens": 6, "adaptive": False, "min_budget": 16}
    with (serving(load_model(LoadConfig(dtype="float32", device="cpu")), max_num_seqs=5, max_model_len=1024, kv_cache_tokens=1536,
                  kv_offloading_size=0.05, speculative_config=spec) as server,
          chromium(viewport={"width": 1200, "height": 760}) as context):
        threads = [threading.Thread(target=_load, args=(server.url, stop, i)) for i in range(5)]
        page = context.pages[0]
        page.goto(f"{server.url}/dashboard")
        for thread in threads:
            thread.start()
        page.wait_for_timeout(1000 * seconds)
        page.get_by_label("Temperature").fill("0.6")
        page.get_by_label("Message").fill("List ten facts about the Moon, one a line.")
        page.get_by_role("button", name="Send").click()
        page.locator(".draft").nth(14).wait_for(timeout=120_000)
        page.screenshot(path=path)
        stop.set()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    picture(sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 60)
