"""Pictures of reports for the docs, at a laptop's and a phone's width.

    llama-infer inspect --prompt "The capital of France is"
    llama-train plot runs
    pip install playwright
    python docs/screenshots.py inspect.html docs/images --browser /usr/bin/chromium
    python docs/screenshots.py curves.html docs/images --browser /usr/bin/chromium

Any Chromium will do; without `--browser` it is the one that `playwright install chromium` fetches.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from playwright.sync_api import sync_playwright

DEVICES = {"laptop": (1280, 800, "light"), "dark": (1280, 800, "dark"), "phone": (390, 844, "light")}
SECTIONS = {
    "inspect": {"top": "html", "attention": "#attention", "rotary": "#rotary", "cost": "#cost", "splits": "#splits"},
    "curves": {"top": "html", "charts": "#charts"},
}
POINTED_AT = {"curves": "#charts svg"}
"""Where the pointer rests, to show what it tells."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("report", type=Path, help=f"{' or '.join(SECTIONS)}.html")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--browser", help="a Chromium that is installed")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    report = options.report.stem
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=options.browser, args=["--no-sandbox"])
        for device, (width, height, scheme) in DEVICES.items():
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
            page.goto(options.report.resolve().as_uri())
            wide = page.evaluate("document.documentElement.scrollWidth")
            if wide > width:
                raise SystemExit(f"the page is {wide} pixels wide on a {device} of {width}")
            for name, selector in SECTIONS[report].items():
                page.evaluate(f"document.querySelector({selector!r}).scrollIntoView()")
                if report in POINTED_AT:
                    page.locator(POINTED_AT[report]).first.hover()
                page.screenshot(path=options.folder / f"{report}-{name}-{device}.png")
        browser.close()


if __name__ == "__main__":
    main()
