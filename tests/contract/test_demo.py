"""`tpuembed demo`: its numbers are those of the files that it writes."""

import csv
import json
import math
from pathlib import Path

import numpy as np
import tensorflow as tf

from tests.support.contract_command import tpuembed
from tests.support.serving.process import run_command


def test_the_json_of_one_epoch(tmp_path: Path) -> None:
    """Ratings of a user are those of a movie's parity, so that there is something to learn."""
    random = np.random.default_rng(0)
    lines = {(user, movie): 1 + 2 * ((user + movie) % 2) for user, movie in random.integers(1, 20, (200, 2)).tolist()}
    (tmp_path / "u.data").write_text("".join(f"{user}\t{item}\t{stars}\t0\n" for (user, item), stars in lines.items()))
    options = ("--ratings", tmp_path / "u.data", "--out", tmp_path / "out", "--epochs", "1", "--json", "--quiet")
    done = run_command("demo", *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    found = json.loads(done.stdout)
    assert len(found["train_rmse"]) == 1
    assert found["predict_p50_ms"] > 0
    with open(found["test_predictions"]) as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["user", "item", "rating", "prediction"]
    assert 0 < len(rows) < len(lines)
    squares = []
    for row in rows:
        assert float(row["rating"]) == (lines[int(row["user"]), int(row["item"])] - 1) / 4
        squares.append((float(row["rating"]) - float(row["prediction"])) ** 2)
    assert math.isclose(math.sqrt(sum(squares) / len(squares)), found["test_rmse"], rel_tol=1e-4)
    assert tf.saved_model.contains_saved_model(found["export_path"])


def test_ratings_that_are_not_ratings_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "u.data").write_text("1\t2\t9\n" * 20)
    for name in ("u.data", "none"):
        assert str(tmp_path / name) in tpuembed("demo", "--ratings", tmp_path / name).refused()
    assert tpuembed("demo", "--epochs", "0").returncode == 2
