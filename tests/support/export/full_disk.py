"""An export onto a disk that fills up, and again with room: `python -m tests.support.export.full_disk PREFIX MODEL_DIR`.

MODEL_DIR lies on a small file system of its own. It reserves nothing, as file systems do that know no fallocate: so that the
kernel refuses a worker's write, and not the reservation before it. Prints what happened as one JSON object.
"""

import contextlib
import errno
import json
import os
import sys
from pathlib import Path

from tests.support.export.killed_export import slow_down
from tests.support.export.processes import children
from tpuembed.errors import ExportError
from tpuembed.export import export_saved_model
from tpuembed.export.stream.resume_log import read_record

CONFIG = {"features": {"x": {"table": "t", "input": "id"}}}


def cannot_reserve(*_: int) -> None:
    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


class FillUp:
    """Takes all the room that is left, once a shard is recorded."""

    def __init__(self, model_dir: Path) -> None:
        self._model_dir = model_dir
        self.filler = model_dir / "filler"

    def __call__(self, done: int, total: int) -> None:
        records = map(read_record, self._model_dir.glob(".staging-*/tables"))
        if self.filler.exists() or not any(record and record.finished for record in records):
            return
        with contextlib.suppress(OSError), open(self.filler, "wb", buffering=0) as file:
            while file.write(bytes(1 << 16)):
                pass


def main() -> None:
    prefix, model_dir = sys.argv[1], Path(sys.argv[2])
    slow_down()
    os.posix_fallocate = cannot_reserve
    fill_up, message = FillUp(model_dir), ""
    try:
        export_saved_model(prefix, model_dir, serving_config=CONFIG, workers=1, on_progress=fill_up)
    except ExportError as error:
        message = str(error)
    left = sorted(path.name.partition("-")[0] for path in model_dir.iterdir())
    found = {"message": message, "left": left, "children": children(os.getpid())}
    fill_up.filler.unlink()
    report = export_saved_model(prefix, model_dir, serving_config=CONFIG, workers=1)
    data = sorted(report.path.glob("variables/*.data-*"))[-1].read_bytes()
    Path(f"{prefix}.copy").write_bytes(data)
    print(json.dumps({**found, "reused": report.bytes_reused, "after": [path.name for path in model_dir.iterdir()]}))


if __name__ == "__main__":
    main()
