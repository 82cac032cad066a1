"""Pictures of the chat page for the docs: a laptop's, in the dark with its settings, and a phone's.

llama-infer serve &
pip install playwright
python docs/serve_screenshots.py http://127.0.0.1:8000 docs/images --browser /usr/bin/chromium
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

DEVICES = {"laptop": (1000, 720, "light"), "dark": (1000, 720, "dark"), "phone": (390, 844, "light")}
QUESTIONS = ("What is the capital of France?", "Write a Python function that adds two numbers, with an example.")


def ask(page: Any, text: str) -> None:
    page.fill("#text", text)
    page.keyboard.press("Enter")
    page.wait_for_selector("#stop:visible")
    page.wait_for_selector("#send:visible", timeout=120_000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--browser", help="a Chromium that is installed")
    options = parser.parse_args()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=options.browser, args=["--no-sandbox"])
        for device, (width, height, scheme) in DEVICES.items():
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
            page.goto(options.url)
            page.click("#settings-button")
            page.fill("#temperature", "0")
            page.fill("#max_tokens", "160")
            if device != "dark":
                page.click("#settings-button")
            for question in QUESTIONS:
                ask(page, question)
            page.screenshot(path=options.folder / f"serve-{device}.png")
        browser.close()


if __name__ == "__main__":
    main()
