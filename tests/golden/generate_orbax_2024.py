"""Writes tests/golden/orbax/tree_zarr3_2024 with an Orbax of 2024; see README.md beside it for how to run it.

In zarr 3, whose arrays have a fill value, it left out chunks of zeros, and did not say so.
"""

import json
import os
import shutil
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax
import numpy as np
import orbax.checkpoint as ocp

FOLDER = Path(__file__).parent / "orbax" / "tree_zarr3_2024"


def main() -> None:
    """A table in four shards, the second of which is zeros, and a table of zeros."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    rows = np.random.default_rng(7).uniform(0.1, 1.0, (16, 4)).astype(np.float32)
    rows[4:8] = 0
    tables = {"emb": rows, "zeros": np.zeros((8, 3), np.float32)}
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x", None))
    tree = {name: jax.device_put(table, sharding) for name, table in tables.items()}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=True)) as checkpointer:
        checkpointer.save((FOLDER / "ckpt").absolute(), args=ocp.args.PyTreeSave(tree))
    for name, table in tables.items():
        np.save(FOLDER / f"{name}.npy", table)
    said = {name: {"rows": f"{name}.npy", "slots": {}, "dtype": "float32"} for name in tables}
    truth = {"tables": said, "checkpoint": "ckpt", "options": {}}
    (FOLDER / "truth.json").write_text(json.dumps(truth, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
