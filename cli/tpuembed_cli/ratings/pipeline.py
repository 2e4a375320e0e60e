"""The demo's pipeline: train, checkpoint, export, serve, predict."""

import csv
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tpuembed import export_saved_model
from tpuembed.errors import ConfigError
from tpuembed_cli.ratings import data
from tpuembed_cli.ratings.client import Client, serving
from tpuembed_cli.ratings.data import Ratings
from tpuembed_cli.ratings.model import build, rmse

__all__ = ["DemoResult", "run_demo"]

_BATCH = 256
_TIMED_REQUESTS = 300


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoResult:
    """The results of the demo. RMSE is in the unit of the labels, (rating - 1) / 4."""

    ratings: str
    train_rmse: list[float]
    test_rmse: float
    test_predictions: str
    checkpoint: str
    export_path: str
    export_bytes: int
    export_seconds: float
    peak_rss_bytes: int
    worker_peak_rss_bytes: int
    first_prediction: float
    first_prediction_in_training: float
    largest_difference: float
    compared: int
    predict_p50_ms: float

    def to_dict(self) -> dict[str, Any]:
        """Return the results as JSON values."""
        return dataclasses.asdict(self)


def run_demo(ratings: Ratings, origin: str, out: Path, epochs: int, say: Callable[[str], None]) -> DemoResult:
    """Run the whole pipeline. All files are written to `out`."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be created: {error.strerror}. Give another folder.") from None
    keras.utils.set_random_seed(42)
    train, test = data.split(ratings)
    users, items = int(ratings.users.max()) + 1, int(ratings.items.max()) + 1
    say(f"1/5 train: {len(train)} ratings, {users - 1} users, {items - 1} items, {epochs} epochs")
    model = build(users, items)
    train_rmse = _train(model, train, epochs, say)
    predicted = model.predict(_inputs(test), batch_size=4096, verbose=0)[:, 0]
    say(f"2/5 checkpoint: {out / 'ckpt'}")
    checkpoint = tf.train.Checkpoint(model=model).write(str(out / "ckpt"))
    say(f"3/5 export: {out / 'ratings'}")
    report = export_saved_model(checkpoint, out / "ratings", model=lambda: build(users, items))
    say("4/5 serve")
    with serving(out / "ratings") as client:
        say(f"5/5 predict over HTTP: {len(test)} test ratings, then {_TIMED_REQUESTS} requests of one row")
        served = _predict(client, test)
        p50 = client.p50_ms([_body(test.take(slice(at, at + 1))) for at in range(min(_TIMED_REQUESTS, len(test)))])
    return DemoResult(
        ratings=f"{len(ratings)} ({origin})",
        train_rmse=train_rmse,
        test_rmse=float(np.sqrt(np.mean(np.square(served - test.labels)))),
        test_predictions=str(_write_predictions(out / "test_predictions.csv", test, served)),
        checkpoint=checkpoint,
        export_path=str(report.path),
        export_bytes=report.bytes_written,
        export_seconds=report.seconds,
        peak_rss_bytes=report.peak_rss_bytes,
        worker_peak_rss_bytes=report.worker_peak_rss_bytes,
        first_prediction=float(served[0]),
        first_prediction_in_training=float(predicted[0]),
        largest_difference=float(np.abs(served - predicted).max()),
        compared=len(test),
        predict_p50_ms=p50,
    )


def _inputs(ratings: Ratings) -> dict[str, npt.NDArray[np.int64]]:
    return {"user_id": ratings.users, "movie_id": ratings.items}


def _train(model: Any, train: Ratings, epochs: int, say: Callable[[str], None]) -> list[float]:
    model.compile(optimizer="adagrad", loss="mse", metrics=[rmse()])
    dataset = tf.data.Dataset.from_tensor_slices((_inputs(train), train.labels[:, None]))
    dataset = dataset.shuffle(len(train), seed=42).batch(_BATCH).prefetch(2)
    epoch_said = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: say(f"    epoch {epoch + 1} of {epochs}: RMSE {logs['rmse']:.4f}")
    )
    history = model.fit(dataset, epochs=epochs, verbose=0, shuffle=False, callbacks=[epoch_said])
    return [float(value) for value in history.history["rmse"]]


def _predict(client: Client, test: Ratings, rows: int = 1000) -> npt.NDArray[np.float32]:
    parts = [client.answer(_body(test.take(slice(start, start + rows)))) for start in range(0, len(test), rows)]
    return np.concatenate([np.asarray(part, np.float32)[:, 0] for part in parts])


def _body(ratings: Ratings) -> Any:
    named = zip(ratings.users.tolist(), ratings.items.tolist(), strict=True)
    return {"instances": [{"user_id": user, "movie_id": item} for user, item in named]}


def _write_predictions(path: Path, test: Ratings, predictions: npt.NDArray[np.float32]) -> Path:
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["user", "item", "rating", "prediction"])
        writer.writerows(
            zip(test.users.tolist(), test.items.tolist(), test.labels.tolist(), predictions.tolist(), strict=True)
        )
    return path
