"""A headless Chromium, which notes what its pages say and ask for."""

import json
import os
import shutil
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import pytest

WAIT_SECONDS = 20.0


class Browser:
    """A window. `with` closes it."""

    def __init__(self, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
        if chromium is None or driver is None:
            pytest.skip("chromium or chromedriver is not installed: apt-get install chromium chromium-driver")
        webdriver = pytest.importorskip("selenium.webdriver")
        options = webdriver.ChromeOptions()
        options.binary_location = chromium
        # Chromium starts no sandbox for root.
        alone = ["--no-sandbox"] if os.geteuid() == 0 else []
        for argument in ("--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", *alone):
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options, webdriver.ChromeService(driver))
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.driver.quit()

    def open(self, url: str) -> None:
        self.driver.get(url)

    def js(self, code: str, *arguments: Any) -> Any:
        """What `return CODE` is in the page."""
        return self.driver.execute_script(f"return {code}", *arguments)

    def wait(self, code: str, *arguments: Any) -> Any:
        """Until `code` is true in the page."""
        from selenium.webdriver.support.ui import WebDriverWait

        wait = WebDriverWait(self.driver, WAIT_SECONDS, poll_frequency=0.05)
        return wait.until(lambda _: self.js(code, *arguments), f"{code}\n{self.text}")

    def find(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def click(self, selector: str) -> None:
        self.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", self.find(selector))
        self.find(selector).click()

    def fill(self, selector: str, text: str) -> None:
        found = self.find(selector)
        found.clear()
        found.send_keys(text)

    def choose(self, selector: str, text: str) -> None:
        from selenium.webdriver.support.ui import Select

        Select(self.find(selector)).select_by_visible_text(text)

    @property
    def text(self) -> str:
        return str(self.js("document.body.innerText"))

    def said(self) -> list[str]:
        """The errors and warnings of the browser's log since the last call."""
        return [one["message"] for one in self.driver.get_log("browser") if one["level"] in ("SEVERE", "WARNING")]

    def requests(self) -> Iterator[str]:
        """The URLs of the requests since the last call."""
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                yield message["params"]["request"]["url"]
