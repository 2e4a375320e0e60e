"""Writes the goldens of the V1 path beside it: the ops of every fixed model.

python -m tests.tpu.v1.generate     # goldens are only added to: review any change of one
"""

import json

from tests.tpu.v1.checks import GOLDEN, described
from tests.tpu.v1.models import MODELS
from tests.tpu.v1.tracing import trace


def main() -> None:
    GOLDEN.mkdir(exist_ok=True)
    for name, make in MODELS.items():
        traced = trace(make())
        (GOLDEN / f"{name}.json").write_text(json.dumps(described(traced), sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
