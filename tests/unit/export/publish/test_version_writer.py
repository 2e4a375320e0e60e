"""What every `VersionWriter` promises, for a folder and for a store."""

import dataclasses
import errno
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.export.fakes import source_of
from tests.support.export.in_process import InProcessEngine
from tests.support.export.store_exports import SHARD_BYTES, TABLES, plan_of, save_graph
from tests.support.messages import refused
from tests.support.stores import S3
from tpuembed.errors import CheckpointCorruptError, ConfigError, ExportError, TpuEmbedError
from tpuembed.export import export_saved_model
from tpuembed.export.options import ExportOptions
from tpuembed.export.plan import planner
from tpuembed.export.plan.plan import ShardTask
from tpuembed.export.publish.folder import FolderWriter
from tpuembed.export.publish.version_writer import VersionWriter, naming_model_dir
from tpuembed.export.report import StreamReport
from tpuembed.export.run import choose_writer
from tpuembed.export.stream import resume_log
from tpuembed.export.stream.execute import stream_tables
from tpuembed.export.stream.shard import ShardResult, Source
from tpuembed.files import MissingBucketError, as_path

NARROW, WIDE = b"".join(TABLES[name].tobytes() for name in "abcd"), TABLES["wide"].tobytes()


@dataclasses.dataclass
class Place:
    """A MODEL_DIR, and a look into it that is not the writer's."""

    url: str
    server: S3 | None = None

    def files(self) -> dict[str, bytes]:
        """Path below MODEL_DIR -> content."""
        if self.server is None:
            folder = Path(self.url)
            return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        bucket = self.url.split("/")[2]
        return {key.removeprefix("m/"): self.server.get(bucket, key) for key in self.server.keys(bucket)}


@pytest.fixture(params=["folder", "store"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setattr(planner, "_SHARD_BYTES", SHARD_BYTES)
    monkeypatch.setattr(resume_log, "_SECONDS_BETWEEN_FLUSHES", 0.01)
    if request.param == "folder":
        yield Place(str(tmp_path / "models"))
    else:
        yield Place(f"s3://{request.getfixturevalue('bucket')}/m", request.getfixturevalue("server"))


class Interrupted(InProcessEngine):
    """Fails after some of the tasks."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def run(
        self, tasks: Sequence[ShardTask], source: Source, writer: VersionWriter, **callbacks: Any
    ) -> list[ShardResult]:
        super().run(tasks[: len(tasks) // 2], source, writer, **callbacks)
        while isinstance(writer, FolderWriter) and not writer.finished:  # a thread records them
            time.sleep(0.01)
        raise self._error


def writer_for(place: Place, prefix: Path, lasts: bool = True, **options: Any) -> VersionWriter:
    source = dataclasses.replace(source_of(prefix), lasts=lasts)
    return choose_writer(place.url, plan_of(prefix), ExportOptions(**options), source)


def export(
    place: Place, prefix: Path, engine: InProcessEngine | None = None, **options: Any
) -> tuple[str, StreamReport]:
    writer = writer_for(place, prefix, **options)
    writer.check()
    with writer:
        save_graph(writer)
        report = stream_tables(source_of(prefix), writer, engine or InProcessEngine())
        for stack in writer.plan.stacks if isinstance(as_path(place.url), Path) else ():
            (writer.path / "variables" / stack.file).hardlink_to(report.folder / stack.file)
        return str(writer.publish()), report


def assert_complete(place: Place, version: str) -> None:
    """The data files are the tables side by side, and servers see nothing else."""
    files = place.files()
    data = sorted(content for name, content in files.items() if name.startswith(f"{version}/variables/") and content)
    assert NARROW in data
    assert WIDE in data
    assert f"{version}/saved_model.pb" in files
    assert not any(name.startswith(".staging") for name in files)


def test_an_interrupted_export_says_what_is_kept_and_the_next_one_reuses_it(place: Place, prefix: Path) -> None:
    """In a folder. In a store, nothing is kept."""
    kept = r" (1 finished shard was|\d+ finished shards were) kept\. Run the same export again to resume\."
    with pytest.raises(ExportError, match=rf"^no more\.{kept if place.server is None else ''}$"):
        export(place, prefix, Interrupted(ExportError("no more.")))
    assert not any(name[0].isdigit() for name in place.files()), "nothing is published"
    path, report = export(place, prefix)
    assert path == f"{place.url}/1"
    assert (0 < report.bytes_reused < report.bytes_written) == (place.server is None)
    assert_complete(place, "1")


@pytest.mark.parametrize("why", ["a damaged source", "a source that does not last"])
def test_what_no_export_can_resume_is_removed(place: Place, prefix: Path, why: str) -> None:
    error: TpuEmbedError = ExportError("no more.")
    if why == "a damaged source":
        error = CheckpointCorruptError("no more.")
    with pytest.raises(type(error), match=r"^no more\.$"):
        export(place, prefix, Interrupted(error), lasts=why == "a damaged source")
    assert place.files() == {}
    if place.server is not None:
        assert place.server.uploads(place.url.split("/")[2]) == []


def test_an_existing_version_is_refused_before_anything_is_written(place: Place, prefix: Path) -> None:
    export(place, prefix, version=7)
    before = place.files()
    writer = writer_for(place, prefix, version=7)
    for call in (writer.check, writer.reserve):
        with refused(ExportError, match="version 7"):
            call()
    assert place.files() == before


@pytest.mark.parametrize("version", [0, -1, 2**63])
def test_a_version_that_no_server_reads_is_refused(place: Place, prefix: Path, version: int) -> None:
    with refused(ConfigError):
        writer_for(place, prefix, version=version).check()
    assert place.server is not None or not Path(place.url).exists()


@pytest.mark.parametrize(
    ("model_dir", "error", "text"),
    [
        ("m", FileExistsError(errno.EEXIST, "File exists"), "it, or a folder above it, is a file. Name a directory."),
        ("m", OSError(errno.EACCES, "Denied"), "cannot be written: Denied. Name a directory that you may write to."),
        ("m", OSError(errno.EROFS, "Read-only"), "cannot be written: Read-only. Name a directory that you may write"),
        ("m", OSError(errno.ENOSPC, "No space"), "cannot be written: No space. Free space or repair the disk."),
        ("m", OSError("odd"), "cannot be written: odd. Free space or repair the disk."),
        ("s3://b/m", OSError(errno.EACCES, "403"), "cannot be written: 403. These credentials are wrong, or may not"),
        ("s3://b/m", MissingBucketError(2, "no bucket"), "cannot be written: no bucket. Create it, or name another"),
        ("s3://b/m", OSError(errno.EIO, "500"), "cannot be written: 500."),
    ],
)
def test_an_error_of_the_system_names_model_dir_and_the_remedy(model_dir: str, error: OSError, text: str) -> None:
    with pytest.raises(ExportError) as caught, naming_model_dir(as_path(model_dir)):
        raise error
    assert str(caught.value).startswith(f"MODEL_DIR {model_dir}: {text}")


def test_an_unknown_option_of_an_export_is_refused_by_name(prefix: Path, tmp_path: Path) -> None:
    with refused(ConfigError, match="'storage'"):
        export_saved_model(prefix, tmp_path / "m", storge="int8")
    assert not (tmp_path / "m").exists()
