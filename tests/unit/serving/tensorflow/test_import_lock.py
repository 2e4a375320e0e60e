"""TensorFlow is imported on a file system that is read-only all over."""

import subprocess
import sys

SCRIPT = """
import tempfile
tempfile._candidate_tempdir_list = lambda: ["/proc/none"]
import tpuembed_serving.tensorflow.import_lock
import tensorflow
print(tensorflow.__version__)
"""


def test_without_a_folder_for_temporary_files() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-500:]
    assert done.stdout.startswith("2.")
