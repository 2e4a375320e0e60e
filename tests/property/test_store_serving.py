"""Whatever happens to a store and to the server: what is served is a version as it was published, and the right one."""

import contextlib
import itertools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from tests.support.serving.doubles import export_files
from tests.support.stores import GcsStub
from tpuembed.files import as_path, remote
from tpuembed.manifest import MANIFEST_PATH
from tpuembed_serving.core.servable import Servable, State
from tpuembed_serving.models import stores
from tpuembed_serving.models.model import ServedModel
from tpuembed_serving.models.stores import Puller
from tpuembed_serving.settings import ModelSettings

VERSIONS = st.integers(1, 3)


class _Loaded:
    """What a load has read."""

    def __init__(self, folder: Path) -> None:
        self.content = {
            str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()
        }

    def close(self) -> None:
        pass


class Machine(RuleBasedStateMachine):
    """A bucket, a cache and a server over them, against the dictionaries `published` and `stored`."""

    buckets = itertools.count()
    stub: GcsStub

    @initialize()
    def begin(self) -> None:
        self.bucket = f"bucket{next(self.buckets)}"
        self.folder = Path(tempfile.mkdtemp())
        self.published: dict[int, list[dict[str, bytes]]] = {}
        self.tokens = itertools.count(1)
        self.stub.objects[f"{self.bucket}/other"] = b"so that there is a bucket"
        self.stub.fault = None
        self.boot()

    def boot(self) -> None:
        base_path = as_path(f"gs://{self.bucket}/m")
        model = ModelSettings(name="m", base_path=base_path)
        self.reserved = contextlib.ExitStack()
        self.puller = Puller(self.folder / "cache", 0.01)
        self.reserved.enter_context(self.puller.reserved())
        self.puller.configure([model])

        def load(path: Path) -> Servable:
            found: Any = _Loaded(path)
            return found

        self.model = ServedModel(model, load, lambda: None, cache=self.folder / "cache")

    def die(self) -> None:
        self.reserved.close()
        for record in self.model._versions.values():
            record.held.close()

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.die()
            shutil.rmtree(self.folder)

    def key(self, version: int, name: str) -> str:
        return f"{self.bucket}/m/{version}/{name}"

    def stored(self, version: int) -> dict[str, bytes]:
        start = self.key(version, "")
        return {key.removeprefix(start): data for key, data in self.stub.objects.items() if key.startswith(start)}

    @rule(version=VERSIONS, files=st.integers(1, 5))
    def publish(self, version: int, files: int) -> None:
        """All files of a new version, or the first ones of an export that is still being copied."""
        content = export_files(next(self.tokens), self.folder / "scratch")
        self.published.setdefault(version, []).append(content)
        for name in [*content][:files]:
            self.stub.objects[self.key(version, name)] = content[name]

    @rule(version=VERSIONS)
    def complete(self, version: int) -> None:
        for content in self.published.get(version, [])[-1:]:
            self.stub.objects.update({self.key(version, name): data for name, data in content.items()})

    @rule(version=VERSIONS, files=st.integers(1, 5))
    def delete(self, version: int, files: int) -> None:
        """Some files, the graph first: what is left is not complete."""
        for name in sorted(self.stored(version), key=lambda name: (name != "saved_model.pb", name))[:files]:
            del self.stub.objects[self.key(version, name)]

    @rule(version=VERSIONS, at=st.integers(0, 10_000))
    def corrupt(self, version: int, at: int) -> None:
        """One bit of a file that a checksum covers."""
        names = sorted(self.stored(version).keys() - {str(MANIFEST_PATH)})
        if names:
            key = self.key(version, names[at % len(names)])
            data = bytearray(self.stub.objects[key])
            data[at % len(data)] ^= 1
            self.stub.objects[key] = bytes(data)

    @rule()
    def restart(self) -> None:
        self.die()
        self.boot()

    @rule(after=st.integers(0, 4))
    def die_in_a_pull(self, after: int) -> None:
        """Be killed after some files: no clean-up runs."""
        left = itertools.count(after, -1)
        download = stores._Store._download

        def deadly(*arguments: Any) -> None:
            if next(left) <= 0:
                raise KeyboardInterrupt
            download(*arguments)

        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            patch.setattr(stores._Store, "_download", deadly)
            patch.setattr("tpuembed_serving.models.stores.shutil.rmtree", lambda *_, **__: None)
            self.puller.poll()
        self.restart()

    @rule(flip=st.integers(0, 10_000))
    def damage_the_cache(self, flip: int) -> None:
        """While no server runs: a file that a checksum covers."""
        self.die()
        files = sorted(path for path in self.folder.glob("cache/m-*/?-*/?/*") if path.is_file())
        if files:
            path = files[flip % len(files)]
            data = bytearray(path.read_bytes())
            data[flip % len(data)] ^= 1
            path.chmod(0o644)
            path.write_bytes(data)
        self.boot()

    @rule(reachable=st.booleans())
    def poll(self, reachable: bool) -> None:
        """Of two copies of one number, a restart finds the one that the store has. The loaded one stays, as in folders."""
        self.stub.fault = None if reachable else _refuse
        before = self.served()
        self.puller.poll()
        self.model.poll()
        self.puller.poll()
        self.model.poll()
        now = self.served()
        if not reachable:
            assert now or not before, "a store that cannot be reached takes nothing away"
            return
        there = [version for version in (1, 2, 3) if self.stored(version)]
        good = [version for version in there if self.stored(version) in self.published.get(version, [])]
        if not there:
            assert not now
        if good:
            assert now, (self.model.statuses(), self.model.listing_error)
            assert max(now) >= max(good)
        if good and max(good) == max(there):
            assert [*now] == [max(good)]
            if now != before and max(good) not in before:
                assert now[max(good)] == self.stored(max(good))

    @invariant()
    def serves_what_was_published(self) -> None:
        if hasattr(self, "model"):
            for version, content in self.served().items():
                assert content in self.published[version]

    def served(self) -> dict[int, dict[str, bytes]]:
        return {
            number: record.servable.content  # type: ignore[union-attr]
            for number, record in self.model._versions.items()
            if record.state is State.AVAILABLE
        }


def _refuse(request: Any) -> bool:
    request.answer(403, b"<Error><Code>AccessDenied</Code></Error>")
    return True


def test_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "_RETRY_SECONDS", 0.000001)
    with GcsStub() as stub:
        for name, value in stub.environment.items():
            monkeypatch.setenv(name, value)
        remote._store.cache_clear()
        Machine.stub = stub
        run_state_machine_as_test(
            Machine,
            settings=settings(
                max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=[*HealthCheck]
            ),
        )
    remote._store.cache_clear()
