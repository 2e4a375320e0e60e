"""The retrieval demo: train two towers, checkpoint, export an index, serve, and ask for the best movies over HTTP."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tpuembed import (
    Adagrad,
    FactorizedTopK,
    FeatureConfig,
    TableConfig,
    TPUEmbedding,
    export_retrieval,
    in_batch_softmax,
)
from tpuembed_cli.ratings import data
from tpuembed_cli.ratings.client import Client, serving
from tpuembed_cli.ratings.data import Ratings
from tpuembed_cli.ratings.pipeline import make_folder

__all__ = ["RetrievalResult", "TwoTowers", "run_retrieval", "tower"]

_DIM = 32
_KS = (1, 5, 10, 50, 100)
_BATCH = 8192
_TIMED_REQUESTS = 300

Ids = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RetrievalResult:
    """The results of the demo. Accuracies are the shares of test ratings whose movie is among the user's best k, by k."""

    ratings: str
    movies: int
    loss: list[float]
    accuracy: dict[int, float]
    served_accuracy: dict[int, float]
    checkpoint: str
    export_path: str
    export_seconds: float
    same_answers: int
    users: int
    user: int
    top_ten: list[int]
    predict_p50_ms: float

    def to_dict(self) -> dict[str, Any]:
        """Return the results as JSON values."""
        return dataclasses.asdict(self)


def tower(name: str, rows: int) -> Any:
    """Build a model of input `name`, int64 [batch], and output float32 [batch, 32]: the rows of a table."""
    ids = keras.Input((), dtype="int64", name=name)
    table = TableConfig(
        rows, _DIM, f"{name}_table", initializer=keras.initializers.RandomUniform(), optimizer=Adagrad(0.1)
    )
    return keras.Model({name: ids}, TPUEmbedding({name: FeatureConfig(table)}, name=f"embed_{name}")({name: ids})[name])


class TwoTowers(keras.Model):
    """Two towers that are trained on pairs, with the other movies of the batch as negatives.

    It is the model of TensorFlow Recommenders' tutorial "basic retrieval": the loss is summed over the batch.
    """

    def __init__(self, users: int, items: int, movies: Ids) -> None:
        """Build towers of `users` and `items` rows. Accuracies are measured among `movies`."""
        super().__init__()
        self.measures = False
        self.query, self.candidate = tower("user_id", users), tower("movie_id", items)
        batches = tf.data.Dataset.from_tensor_slices(movies).batch(128)
        self.top_k = FactorizedTopK(batches.map(lambda ids: (ids, self.candidate({"movie_id": ids}))), ks=_KS)

    def call(self, inputs: Any) -> Any:
        """Return the vectors of users and movies."""
        return self.query({"user_id": inputs["user_id"]}), self.candidate({"movie_id": inputs["movie_id"]})

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, **_: Any
    ) -> Any:
        """Return the sum of the losses of the batch."""
        del x, y, sample_weight
        return tf.reduce_sum(in_batch_softmax(*y_pred))

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        """Measure in evaluation alone."""
        del y, sample_weight
        if self.measures:
            self.top_k.update_state(y_pred[0], x["movie_id"])
        return self.get_metrics_result()


def train(model: TwoTowers, ratings: Ratings, epochs: int, say: Callable[[str], None]) -> list[float]:
    """Train on the pairs of `ratings`. Returns the loss of each epoch, the mean of its batches' sums."""
    model.compile()
    dataset = tf.data.Dataset.from_tensor_slices(pairs(ratings)).shuffle(len(ratings), seed=42).batch(_BATCH)
    said = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: say(f"    epoch {epoch + 1} of {epochs}: loss {logs['loss']:.0f}")
    )
    history = model.fit(dataset, epochs=epochs, verbose=0, shuffle=False, callbacks=[said])
    return [float(value) for value in history.history["loss"]]


def pairs(ratings: Ratings) -> dict[str, Ids]:
    """Return the inputs of the model."""
    return {"user_id": ratings.users, "movie_id": ratings.items}


def measure(model: TwoTowers, ratings: Ratings) -> dict[int, float]:
    """Return the accuracy among the best k, by k."""
    model.measures = True
    model.compile()
    found = model.evaluate(pairs(ratings), batch_size=4096, return_dict=True, verbose=0)
    return {k: float(found[f"factorized_top_k/top_{k}_categorical_accuracy"]) for k in _KS}


def run_retrieval(ratings: Ratings, origin: str, out: Path, epochs: int, say: Callable[[str], None]) -> RetrievalResult:
    """Run the whole pipeline. All files are written to `out`."""
    make_folder(out)
    keras.utils.set_random_seed(42)
    training, test = data.split(ratings)
    users, items, movies = int(ratings.users.max()) + 1, int(ratings.items.max()) + 1, np.unique(ratings.items)
    say(f"1/5 train: {len(training)} ratings, {users - 1} users, {len(movies)} movies, {epochs} epochs")
    model = TwoTowers(users, items, movies)
    loss = train(model, training, epochs, say)
    accuracy = measure(model, test)
    say(f"2/5 checkpoint: {out / 'retrieval-ckpt'}")
    checkpoint = tf.train.Checkpoint(model=model).write(str(out / "retrieval-ckpt"))
    say(f"3/5 export, with an index of {len(movies)} movies: {out / 'top'}")
    batches = tf.data.Dataset.from_tensor_slices({"movie_id": movies, "id": movies}).batch(1024)
    report = export_retrieval(
        checkpoint,
        out / "top",
        query=lambda: tower("user_id", users),
        candidates=lambda: (tower("movie_id", items), batches),
        k=max(_KS),
    )
    say("4/5 serve")
    asked = np.unique(test.users)
    vectors, all_movies = (
        model.query.predict({"user_id": asked}, verbose=0),
        model.candidate({"movie_id": movies}).numpy(),
    )
    with serving(out / "top") as client:
        say(
            f"5/5 the best {max(_KS)} movies of {len(asked)} users over HTTP, then {_TIMED_REQUESTS} requests of one user"
        )
        best = _ask(client, asked)
        user = int(test.users[0])
        seen = training.items[training.users == user].tolist()
        body = {"signature_name": "filtered", "instances": [{"user_id": user, "exclude": seen, "require_tags": 0}]}
        top_ten = client.answer(body)[0]["ids"][:10]
        p50 = client.p50_ms([{"instances": [{"user_id": each}]} for each in asked[:_TIMED_REQUESTS].tolist()])
    truth = movies[np.argsort(-(vectors @ all_movies.T), axis=1, kind="stable")[:, : max(_KS)]]
    rows = np.searchsorted(asked, test.users)
    return RetrievalResult(
        ratings=f"{len(ratings)} ({origin})",
        movies=len(movies),
        loss=loss,
        accuracy=accuracy,
        served_accuracy={k: float((best[rows, :k] == test.items[:, None]).any(1).mean()) for k in _KS},
        checkpoint=checkpoint,
        export_path=str(report.path),
        export_seconds=report.seconds,
        same_answers=int((best == truth).all(1).sum()),
        users=len(asked),
        user=user,
        top_ten=top_ten,
        predict_p50_ms=p50,
    )


def _ask(client: Client, users: Ids, rows: int = 200) -> Ids:
    """Return the best movies of each user, int64 [users, k]."""
    parts = [
        client.answer({"instances": [{"user_id": user} for user in users[start : start + rows].tolist()]})
        for start in range(0, len(users), rows)
    ]
    return np.array([row["ids"] for part in parts for row in part], np.int64)
