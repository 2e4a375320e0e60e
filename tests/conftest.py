"""For all tests: what hypothesis draws is the same in every run, unless the environment has TPUEMBED_RANDOM_EXAMPLES.

A suite that is red once in a hundred runs is one that nobody believes; new examples are drawn where somebody looks at them.
Hypothesis also draws constants that it finds in our modules. So other tests beside a test, or other code, may change its examples.

The hooks below serve `tests/support/messages.py`: the messages of our errors.
"""

import gc
import os
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("tests.support")  # helpers' asserts say both sides too

from tests.support.messages import GOLDEN, Messages, begin, current  # noqa: E402 - after the line above

# By default an example may take 200 ms, and drawing it not much longer: on a busy machine either is exceeded by chance.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("new examples", patient)
settings.register_profile("same examples", patient, derandomize=True)
settings.load_profile("new examples" if "TPUEMBED_RANDOM_EXAMPLES" in os.environ else "same examples")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-messages", action="store_true", help=f"rewrite {GOLDEN} for the tests that run")
    parser.addoption(
        "--no-messages", action="store_true", help="do not compare messages: some name what a library says"
    )


def pytest_sessionstart(session: pytest.Session) -> None:
    config = session.config
    base = config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    accept_all = config.getoption("update_messages") or config.getoption("no_messages")
    begin(Messages(config.rootpath, base, compare=not accept_all))


@pytest.hookimpl(tryfirst=True)  # before -k and -m take tests away
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled") is not None and item.get_closest_marker("nightly") is None:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for found in cases.values():
        count = found[0].get_closest_marker("sampled").args[0]  # type: ignore[union-attr]
        kept = {number * len(found) // count for number in range(count)}
        for number, item in enumerate(found):
            if number not in kept:
                item.add_marker("nightly")


def pytest_collection_finish() -> None:
    """Collect garbage less often, and not among modules and tests: it takes a tenth of the time of tests that trace graphs."""
    gc.freeze()
    gc.set_threshold(20_000)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    config = session.config
    if hasattr(config, "workeroutput"):
        config.workeroutput["messages"] = sorted(current().met)
    elif config.getoption("update_messages"):
        is_part = config.option.keyword or config.option.markexpr or config.args != config.getini("testpaths")
        current().write(all_ran=exitstatus == 0 and not is_part)


@pytest.hookimpl(optionalhook=True)  # of xdist, in the process that the workers report to
def pytest_testnodedown(node: Any) -> None:
    current().met.update(getattr(node, "workeroutput", {}).get("messages", ()))
