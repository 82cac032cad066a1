"""Pictures of `llama-infer inspect`'s report for the docs, at a laptop's and a phone's width.

    llama-infer inspect --prompt "The capital of France is"
    pip install playwright
    python docs/screenshots.py inspect.html docs/images --browser /usr/bin/chromium

Any Chromium will do; without `--browser` it is the one that `playwright install chromium` fetches.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from playwright.sync_api import sync_playwright

WIDTHS = {"laptop": (1280, 800), "phone": (390, 844)}
SECTIONS = {"top": "html", "attention": "#attention", "rotary": "#rotary", "cost": "#cost", "splits": "#splits"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("report", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--browser", help="a Chromium that is installed")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=options.browser, args=["--no-sandbox"])
        for device, (width, height) in WIDTHS.items():
            page = browser.new_page(viewport={"width": width, "height": height})
            page.goto(options.report.resolve().as_uri())
            wide = page.evaluate("document.documentElement.scrollWidth")
            if wide > width:
                raise SystemExit(f"the page is {wide} pixels wide on a {device} of {width}")
            for name, selector in SECTIONS.items():
                page.evaluate(f"document.querySelector({selector!r}).scrollIntoView()")
                page.screenshot(path=options.folder / f"inspect-{name}-{device}.png")
        browser.close()


if __name__ == "__main__":
    main()
