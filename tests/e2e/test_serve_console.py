"""The console in a real Chromium: what it shows, what it sends, and what it says when things fail."""

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tests.support.serving.browser import Browser
from tests.support.serving.process import ServerProcess
from tpuembed import export_saved_model

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]

KEY = "the-key-of-this-test-0123456789"
HOSTILE = "<img src=x onerror=document.title='owned'>"
ROWS = np.arange(2400, dtype=np.float32).reshape(1200, 2)
CONFIG = """
model_config_list {{
  config {{
    name: "movies" base_path: "{root}/movies" model_platform: "tensorflow" model_version_policy {{ all {{ }} }}
    version_labels {{ key: "stable" value: 1 }} version_labels {{ key: "canary" value: 2 }}
  }}
  config {{ name: "{hostile}" base_path: "{root}/hostile" model_platform: "tensorflow" }}
  config {{ name: "trends" base_path: "{root}/broken" model_platform: "tensorflow" }}
}}
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two versions of one model, a model with a hostile name, and one that does not load."""
    root = tmp_path_factory.mktemp("console")
    features = {"user": {"table": "users", "input": "id"}, "watched": {"table": "items", "combiner": "sum"}}
    for step in (1, 2):
        tables = tf.train.Checkpoint(
            users=tf.Variable(ROWS, name="users"), items=tf.Variable(ROWS + step, name="items")
        )
        written = tables.write(str(root / "checkpoints" / f"step-{step}000"))
        export_saved_model(written, root / "movies", serving_config={"features": features})
    function = tf.function(lambda ids: {"<b>y</b>": ids * 2}, input_signature=[tf.TensorSpec([None], tf.int64, "ids")])
    module = tf.Module()
    module.f = function
    tf.saved_model.save(module, str(root / "hostile" / "1"), signatures={"serving_default": function})
    (root / "broken" / "3").mkdir(parents=True)
    (root / "broken" / "3" / "saved_model.pb").write_bytes(b"<script>alert(1)</script>")
    (root / "models.config").write_text(CONFIG.format(root=root, hostile=HOSTILE))
    (root / "keys").write_text(f"{KEY}\n")
    return root


class Console(ServerProcess):
    """A server of all models. One of them never loads, so the server is never ready."""

    def __init__(self, root: Path, *options: str) -> None:
        super().__init__(None, root / "log", "--config", str(root / "models.config"), "--metrics", *options)
        self.url = f"http://{self.host}:{self.port}/"

    def wait_for_movies(self, headers: dict[str, str] | None = None) -> None:
        deadline = time.monotonic() + 60
        for target in ("/v1/models/movies/versions/1", "/v1/models/movies/versions/2"):
            while b'"AVAILABLE"' not in self.request("GET", target, headers=headers)[1]:
                assert time.monotonic() < deadline, self.log
                time.sleep(0.05)

    def use(self, requests: int = 200) -> None:
        """Ask, also for an id that no table has."""
        connection = self.connect()
        bodies = ['{"instances": [{"user": 7, "watched": [3, 4]}]}'] * 9 + [
            '{"instances": [{"user": 9999, "watched": [3, 4]}]}'
        ]
        for number in range(requests):
            connection.request("POST", "/v1/models/movies:predict", bodies[number % 10])
            connection.getresponse().read()
        connection.close()


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[Console]:
    with Console(root) as running:
        running.wait_for_movies()
        yield running


@pytest.fixture
def browser() -> Iterator[Browser]:
    with Browser() as opened:
        yield opened


CARDS = "[...document.querySelectorAll('.card')]"
MOVIES = f"{CARDS}.find((card) => card.querySelector('h2').textContent === 'movies')"


def open_trial(browser: Browser) -> None:
    browser.wait(f"!!{MOVIES} && !{MOVIES}.querySelector('.open').disabled")
    browser.js(f"{MOVIES}.setAttribute('id', 'movies')")
    browser.click("#movies .open")
    browser.wait("document.querySelector('#movies .body').value !== ''")


def check_clean(browser: Browser, server: ServerProcess, *allowed: str) -> None:
    """No error in the browser's log but these, and no request to another host."""
    assert [line for line in browser.said() if not any(text in line for text in allowed)] == []
    asked = list(browser.requests())
    assert asked
    assert [url for url in asked if not url.startswith((f"http://{server.host}:{server.port}/", "data:"))] == []
    assert not [url for url in asked if KEY in url]


def test_the_overview_has_models_versions_counts_and_errors(server: Console, browser: Browser) -> None:
    server.use()
    browser.open(server.url)
    browser.wait(f"{CARDS}.length === 3 && {MOVIES}.querySelector('.figures').textContent !== ''")
    browser.wait(f"{MOVIES}.querySelector('.figures').textContent.includes('20 \u00d7 INVALID_ARGUMENT')")
    rows = browser.js(f"[...{MOVIES}.querySelectorAll('tbody tr')].map((row) => row.innerText)")
    assert ["canary" in rows[0], "stable" in rows[1]] == [True, True]
    assert all("AVAILABLE" in row for row in rows)
    text = browser.text
    assert "FAILED" in text
    assert "saved_model.pb" in text
    check_clean(browser, server)


def test_names_and_errors_are_text(server: Console, browser: Browser) -> None:
    browser.open(server.url)
    browser.wait(f"{CARDS}.length === 3")
    assert HOSTILE in browser.js(f"{CARDS}.map((card) => card.querySelector('h2').textContent)")
    browser.js(f"{CARDS}.find((card) => card.textContent.includes('onerror')).setAttribute('id', 'hostile')")
    browser.click("#hostile .open")
    browser.wait("document.querySelector('#hostile .body').value !== ''")
    browser.click("#hostile .send")
    browser.wait("document.querySelector('#hostile .status').textContent === '200'")
    assert "<b>y</b>" in browser.js("document.querySelector('#hostile .describes').textContent")
    assert browser.js("document.querySelectorAll('main img, main script, main b').length") == 0
    assert browser.js("document.title") == "tpuembed console"
    check_clean(browser, server)


def test_a_request_is_sent_answered_and_copied(server: Console, browser: Browser) -> None:
    browser.open(server.url)
    open_trial(browser)
    body = browser.js("document.querySelector('#movies .body').value")
    assert json.loads(body) == {"instances": [{"user": 0, "watched": [0]}]}
    browser.choose("#movies .version", "1")
    browser.wait("document.querySelector('#movies .snippet').textContent.includes('/versions/1:predict')")
    browser.click("#movies .send")
    browser.wait("document.querySelector('#movies .status').textContent === '200'")
    answer = json.loads(browser.js("document.querySelector('#movies .answer pre').textContent"))
    assert answer == {"predictions": [{"user": [0.0, 1.0], "watched": [1.0, 2.0]}]}
    assert browser.js("document.querySelector('#movies .duration').textContent").endswith("ms")
    command = browser.js("document.querySelector('#movies .snippet').textContent")
    done = subprocess.run(
        ["bash", "-c", f"{command} --silent"], capture_output=True, text=True, timeout=100, check=True
    )
    assert json.loads(done.stdout) == answer
    browser.fill("#movies .body", '{"instances": [')
    browser.click("#movies .send")
    browser.wait("document.querySelector('#movies .status').textContent === '400'")
    check_clean(browser, server, "400 (Bad Request)")


def test_the_keyboard_reaches_everything(server: Console, browser: Browser) -> None:
    from selenium.webdriver.common.keys import Keys

    browser.open(server.url)
    browser.wait(f"{CARDS}.length === 3 && !{MOVIES}.querySelector('.open').disabled")
    seen = []
    for _ in range(8):
        browser.driver.switch_to.active_element.send_keys(Keys.TAB)
        seen.append(
            browser.js("document.activeElement.getAttribute('aria-label') || document.activeElement.textContent")
        )
    assert {"API docs", "Try model movies"} <= set(seen)
    names = "[...document.querySelectorAll('input, select, textarea')].every((one) => one.labels.length === 1)"
    assert browser.js(names) is True


def test_a_server_that_stops_and_comes_back(root: Path, browser: Browser) -> None:
    with Console(root) as first:
        first.wait_for_movies()
        port = first.port
        browser.open(first.url)
        browser.wait(f"{CARDS}.length === 3")
        first.stop()
    browser.wait("!document.getElementById('banner').hidden")
    assert "The server does not answer" in browser.text
    assert browser.js("document.getElementById('health').textContent") == "not answering"
    with Console(root, "--rest-port", str(port)):
        browser.wait("document.getElementById('banner').hidden")
        browser.wait("document.getElementById('health').textContent === 'not ready: 1 of 3 models'")


def test_a_key_is_asked_for_and_kept_in_memory_only(root: Path, browser: Browser) -> None:
    with Console(root, "--api-key-file", str(root / "keys")) as server:
        server.wait_for_movies({"x-api-key": KEY})
        browser.open(server.url)
        browser.wait("!document.getElementById('login').hidden")
        assert browser.js("document.getElementById('main').hidden") is True
        browser.fill("#key", "this-is-not-the-key-000")
        browser.click("#login button")
        browser.wait("document.getElementById('refusal').textContent === 'The server refused this key.'")
        assert browser.js("document.querySelectorAll('.card').length") == 0
        browser.fill("#key", KEY)
        browser.click("#login button")
        open_trial(browser)
        browser.click("#movies .send")
        browser.wait("document.querySelector('#movies .status').textContent === '200'")
        assert KEY not in browser.js("document.documentElement.outerHTML")
        assert "$API_KEY" in browser.js("document.querySelector('#movies .snippet').textContent")
        assert browser.js("[localStorage.length, sessionStorage.length, document.cookie, location.href]") == [
            0,
            0,
            "",
            server.url,
        ]
        check_clean(browser, server, "401 (Unauthorized)")
        browser.driver.refresh()
        browser.wait("!document.getElementById('login').hidden")


def test_counts_are_those_of_all_workers(root: Path, browser: Browser) -> None:
    with Console(root, "--workers", "2") as server:
        server.wait_for_movies()
        for _ in range(20):  # a connection each, which the kernel distributes
            server.use(10)
        browser.open(server.url)
        for _ in range(4):
            browser.wait(f"{MOVIES}?.querySelector('.figures').textContent.includes('20 \u00d7 INVALID_ARGUMENT')")
            browser.driver.refresh()
        check_clean(browser, server)


def test_the_documentation_shows_the_routes(server: Console, browser: Browser) -> None:
    browser.open(f"{server.url}docs")
    browser.wait("document.querySelectorAll('.opblock').length > 5")
    browser.click("#operations-predict-predict .opblock-summary-control")
    browser.wait("document.querySelectorAll('#operations-predict-predict select option').length > 2")
    assert browser.js("document.title") == "tpuembed serving"
    check_clean(browser, server)
