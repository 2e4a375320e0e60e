"""Exports onto a disk with more room each time, until one fits: `python -m tests.e2e.little_room PREFIX MODEL_DIR`.

MODEL_DIR lies on a small file system of its own. Prints the message of each failure, and what it left, as one JSON object.
"""

import json
import os
import sys
from pathlib import Path

from tpuembed.errors import ExportError
from tpuembed.export import export_saved_model

STEP = 8 << 10
CONFIG = {"features": {"x": {"table": "t", "input": "id"}}}


def main() -> None:
    prefix, model_dir = sys.argv[1], Path(sys.argv[2])
    filler, failures = model_dir / "filler", []
    free = os.statvfs(model_dir).f_bavail * os.statvfs(model_dir).f_frsize
    filler.write_bytes(bytes(free - STEP))
    while filler.stat().st_size > STEP:
        try:
            report = export_saved_model(prefix, model_dir, serving_config=CONFIG, workers=1)
        except ExportError as error:
            failures.append([str(error), sorted(path.name for path in model_dir.iterdir() if path.name.isdigit())])
            os.truncate(filler, filler.stat().st_size - STEP)
        else:
            break
    print(json.dumps({"failures": failures, "path": report.path.name}))


if __name__ == "__main__":
    main()
