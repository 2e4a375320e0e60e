"""Any sequence of exports, prunes and rollbacks beside a server that holds versions open loses nothing.

The machine keeps its own account of which rows each version answers. Every version that stays passes `verify_files`, and
TensorFlow loads it and answers these rows. The pretend server holds what TensorFlow loaded, and goes on answering.
"""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.support.export.fakes import random_table, write_checkpoint
from tests.support.export.in_process import exports_in_this_process
from tpuembed import export_saved_model, list_versions, prune_versions, rollback_version
from tpuembed.checkpoint.tools import verify_files
from tpuembed.errors import ConfigError

ROWS, DIM, TABLES = 40, 4, 2
CONFIG = {"features": {"user": {"table": "users", "input": "id"}}}


def table(seed: int) -> Any:
    return random_table(ROWS, DIM, seed=seed)


def rows(loaded: Any) -> Any:
    return loaded.signatures["serving_default"](user=tf.range(ROWS, dtype=tf.int64))["user"].numpy()


class Retention(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="retention-"))
        self.model_dir = self.folder / "rec"
        self.content: dict[int, int] = {}
        self.served: dict[int, tuple[Any, int]] = {}

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    @initialize()
    def prepare(self) -> None:
        for seed in range(TABLES):
            write_checkpoint(self.folder / f"ckpt-{seed}", {"users": table(seed)})

    @rule(
        seed=st.integers(0, TABLES - 1),
        layout=st.sampled_from(["variables", "mmap"]),
        keep=st.none() | st.integers(1, 3),
        finite=st.booleans(),
    )
    def export(self, seed: int, layout: str, keep: int | None, finite: bool) -> None:
        with exports_in_this_process():
            report = export_saved_model(
                self.folder / f"ckpt-{seed}",
                self.model_dir,
                serving_config=CONFIG,
                layout=layout,
                keep=keep,
                require_finite=finite,
            )
        self.content[report.version] = seed
        assert report.version == max(self.content)
        self._forget(report.removed, sorted(self.content)[: -keep if keep else None] if keep else [])

    @precondition(lambda self: self.content)
    @rule(choice=st.integers(0, 9))
    def serve(self, choice: int) -> None:
        version = sorted(self.content)[choice % len(self.content)]
        self.served[version] = (tf.saved_model.load(str(self.model_dir / str(version))), self.content[version])

    @precondition(lambda self: self.content)
    @rule(keep=st.integers(1, 3), told=st.booleans())
    def prune(self, keep: int, told: bool) -> None:
        held = dict.fromkeys(self.served, "loaded") if told else {}
        planned = prune_versions(self.model_dir, keep=keep, in_use=lambda _: held, dry_run=True)
        report = prune_versions(self.model_dir, keep=keep, in_use=lambda _: held)
        assert planned.removed == report.removed
        self._forget(report.removed, [version for version in sorted(self.content)[:-keep] if version not in held])
        assert not list(self.model_dir.glob(".*"))

    @precondition(lambda self: len(self.content) > 1)
    @rule(renames=st.integers(0, 2))
    def prune_is_killed(self, renames: int) -> None:
        """After so many renames, or before the first file is deleted."""
        rename, older = Path.rename, sorted(self.content)[:-1]

        def dying(path: Path, target: Path) -> Path:
            nonlocal renames
            if renames == 0:
                raise KeyboardInterrupt
            renames -= 1
            return rename(path, target)

        def killed(path: Path, **_: Any) -> None:
            raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Path, "rename", dying)
            patch.setattr(shutil, "rmtree", killed)
            with pytest.raises(KeyboardInterrupt):
                prune_versions(self.model_dir, keep=1)
        gone = tuple(version for version in older if not (self.model_dir / str(version)).exists())
        self._forget(gone, older[: len(gone)])

    @precondition(lambda self: len(self.content) > 1)
    @rule(choice=st.none() | st.integers(0, 9))
    def rollback(self, choice: int | None) -> None:
        older = sorted(self.content)[:-1]
        version = None if choice is None else older[choice % len(older)]
        report = rollback_version(self.model_dir, version)
        assert report.source == (older[-1] if version is None else version)
        assert report.version == max(self.content) + 1
        self.content[report.version] = self.content[report.source]

    @precondition(lambda self: len(self.content) == 1)
    @rule()
    def rollback_to_nothing(self) -> None:
        with pytest.raises(ConfigError):
            rollback_version(self.model_dir)

    @precondition(lambda self: self.content)
    @rule()
    def stop_serving(self) -> None:
        self.served.clear()

    @invariant()
    def every_version_is_whole(self) -> None:
        found = [path.name for path in self.model_dir.iterdir()] if self.content else []
        seen = [name for name in found if not name.startswith(".pruned-")]
        assert sorted(seen) == sorted(map(str, self.content))
        for info in list_versions(self.model_dir) if found else ():
            assert not verify_files(str(info.path)).damaged
            assert (info.bases, info.fault) == ((), "")

    @invariant()
    def every_answer_is_right(self) -> None:
        for loaded, seed in self.served.values():
            np.testing.assert_array_equal(rows(loaded), table(seed))
        for version, seed in self.content.items():
            np.testing.assert_array_equal(rows(tf.saved_model.load(str(self.model_dir / str(version)))), table(seed))

    def _forget(self, removed: tuple[int, ...], expected: list[int]) -> None:
        assert list(removed) == expected
        for version in removed:
            del self.content[version]


SHORT = settings(max_examples=4, stateful_step_count=8, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.nightly
def test_sequences() -> None:
    run_state_machine_as_test(Retention, settings=SHORT)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_many_sequences() -> None:
    run_state_machine_as_test(Retention, settings=settings(SHORT, max_examples=60, stateful_step_count=20))
