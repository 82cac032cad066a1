"""The chat page, as a browser runs it: with the embedded model's words replaced by ones that are known."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from llama_infer import LLM

from .conftest import Running, Serving

pytestmark = pytest.mark.browser
LAPTOP, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
SAID = "Some **words**, `x = 1`, <b>no HTML</b>:\n```python\nfor i in range(3):\n    print(i)\n```\nThat is all."


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.skip("no Chromium on PATH")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any, server: Running) -> Iterator[Any]:
    """A laptop's page on which any error of its script fails the test."""
    context = browser.new_context(viewport=LAPTOP, permissions=["clipboard-read", "clipboard-write"])
    page = context.new_page()
    page.set_default_timeout(20_000)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.goto(server.url)
    yield page
    context.close()
    assert not [error for error in errors if "the server responded with a status of 4" not in error]


def says(page: Any, text: str) -> None:
    """Has the model say this: the page's requests get one more field on their way."""

    def force(route: Any) -> None:
        body = {**route.request.post_data_json, "structured_outputs": {"choice": [text]}}
        route.continue_(post_data=body)

    page.route("**/v1/chat/completions", force)


def ask(page: Any, text: str) -> None:
    page.fill("#text", text)
    page.keyboard.press("Enter")


def until(page: Any, script: str, seconds: float = 20) -> None:
    """Playwright's own wait evaluates texts inside the page, which its policy forbids."""
    end = time.monotonic() + seconds
    while not page.evaluate(script):
        assert time.monotonic() < end, script
        page.wait_for_timeout(20)


def ended(page: Any) -> None:
    page.wait_for_selector("#send:visible")
    page.wait_for_selector("article.assistant .note button")


def test_an_answer_with_code(page: Any, server: Running) -> None:
    says(page, SAID)
    ask(page, "Hello <i>you</i>")
    ended(page)
    assert page.inner_text("article.user .words") == "Hello <i>you</i>"
    words = page.locator("article.assistant .words")
    assert words.locator("strong").inner_text() == "words"
    assert words.locator(":scope > code").inner_text() == "x = 1"
    assert words.locator("b").count() == 0
    assert "<b>no HTML</b>" in words.inner_text()
    assert words.locator("pre").inner_text() == "for i in range(3):\n    print(i)\n"
    assert words.inner_text().endswith("That is all.")
    note = page.inner_text("article.assistant .note")
    tokens = len(server.llm.tokenizer.encode(SAID, add_bos=False)) if server.llm.tokenizer else 0
    assert f"{tokens + 1} tokens" in note or f"{tokens} tokens" in note
    assert "tokens/s" in note
    words.locator(".block .copy").click()
    assert page.evaluate("navigator.clipboard.readText()") == "for i in range(3):\n    print(i)\n"
    page.locator("article.assistant .note .copy").click()
    assert page.evaluate("navigator.clipboard.readText()") == SAID


def test_keys_and_a_conversation(page: Any, server: Running) -> None:
    sent: list[Any] = []
    page.on("request", lambda r: sent.append(r.post_data_json) if r.url.endswith("completions") else None)
    says(page, "Yes.")
    page.keyboard.press("Tab")  # away from the box
    page.click("h1")
    page.keyboard.press("/")
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    ended(page)
    ask(page, "three")
    until(page, "document.querySelectorAll('article.assistant .note button').length === 2")
    assert [m["content"] for m in sent[-1]["messages"]] == ["one\ntwo", "Yes.", "three"]
    page.keyboard.press("Alt+n")
    assert page.locator("article").count() == 0
    assert page.evaluate("document.activeElement.id") == "text"


def test_settings_are_sent_and_remembered(page: Any) -> None:
    sent: list[Any] = []
    page.on("request", lambda r: sent.append(r.post_data_json) if r.url.endswith("completions") else None)
    page.click("#settings-button")
    assert page.evaluate("document.activeElement.id") == "system"
    page.fill("#system", "Be a pirate.")
    page.fill("#temperature", "0")
    page.fill("#max_tokens", "3")
    page.fill("#seed", "7")
    ask(page, "Hi")
    ended(page)
    assert sent[-1]["messages"][0] == {"role": "system", "content": "Be a pirate."}
    assert (sent[-1]["temperature"], sent[-1]["max_tokens"], sent[-1]["seed"]) == (0, 3, 7)
    assert "top_p" not in sent[-1]
    assert "at the limit" in page.inner_text("article.assistant .note")
    page.reload()
    assert page.input_value("#system") == "Be a pirate."


def test_stop_frees_the_request(page: Any, server: Running) -> None:
    says(page, "la " * 300)
    ask(page, "Sing")
    until(page, "document.querySelector('article.assistant .words').textContent.length > 10")
    page.keyboard.press("Escape")
    ended(page)
    assert "stopped" in page.inner_text("article.assistant .note")
    assert len(page.inner_text("article.assistant .words")) < 800
    assert server.is_idle()
    assert page.is_visible("#send")


def test_an_error_is_shown(page: Any) -> None:
    page.click("#settings-button")
    page.fill("#temperature", "7")
    ask(page, "Hi")
    page.wait_for_selector("article.assistant .wrong")
    assert "temperature: Input should be less than or equal to 2" in page.inner_text(".wrong")
    page.fill("#temperature", "0")
    page.fill("#max_tokens", "2")
    ask(page, "Hi again")
    until(page, "document.querySelectorAll('article').length === 4")
    page.wait_for_selector("#send:visible")


def test_dark_and_light(browser: Any, page: Any, server: Running) -> None:
    def ground(of: Any) -> str:
        return str(of.evaluate("getComputedStyle(document.body).backgroundColor"))

    assert ground(page) == "rgb(255, 255, 255)"
    page.click("#theme")
    dark = ground(page)
    assert dark != "rgb(255, 255, 255)"
    page.reload()
    assert ground(page) == dark
    context = browser.new_context(color_scheme="dark")
    other = context.new_page()
    other.goto(server.url)
    assert ground(other) == dark
    context.close()


def test_fits_a_phone(browser: Any, server: Running) -> None:
    context = browser.new_context(viewport=PHONE, has_touch=True, is_mobile=True)
    page = context.new_page()
    page.goto(server.url)
    says(page, SAID + "\n```\n" + "long " * 60 + "\n```\n" + "word" * 100)
    page.tap("#settings-button")
    page.tap("#settings-button")
    page.fill("#text", "Hi")
    page.tap("#send")
    ended(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    assert page.evaluate("document.documentElement.scrollHeight") <= PHONE["height"]
    box = page.locator("#text").bounding_box()
    assert box["y"] + box["height"] <= PHONE["height"]
    context.close()


def test_with_a_key(browser: Any, tiny: Callable[..., LLM], serving: Serving) -> None:
    with serving(tiny(), api_key="secret") as server:
        page = browser.new_page()
        page.goto(server.url)
        ask(page, "Hi")
        page.wait_for_selector(".wrong")
        assert "no API key" in page.inner_text(".wrong")
        page.click("#settings-button")
        page.fill("#key", "secret")
        page.fill("#max_tokens", "2")
        ask(page, "Hi")
        until(page, "document.querySelectorAll('article.assistant .note button').length === 2")
        assert page.locator(".wrong").count() == 1
        assert page.evaluate("Object.keys(localStorage).includes('llama-key')") is False
        page.close()


def test_it_loads_nothing_from_elsewhere(page: Any, server: Running) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    response = page.reload()
    assert asked == [f"{server.url}/"]
    assert "default-src 'none'" in response.headers["content-security-policy"]
