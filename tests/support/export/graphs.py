"""A small graph over the stacks of a plan, saved as an export saves its own."""

from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from tpuembed.export.plan.plan import ExportPlan
from tpuembed.export.report import SavedGraph
from tpuembed.manifest import FromActivations, Packing


def save_gathers(plan: ExportPlan, folder: Path) -> SavedGraph:
    """Save a SavedModel whose signature gathers rows of every stack."""
    module = tf.Module()
    for stack in plan.stacks:
        variable = resource_variable_ops.UninitializedVariable(
            shape=[stack.rows, stack.dim], dtype=tf.float32, name=stack.name, trainable=False
        )
        setattr(module, stack.name, variable)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64, name="ids")])
    def gather(ids: Any) -> Any:
        return {stack.name: tf.gather(getattr(module, stack.name), ids) for stack in plan.stacks}

    tf.saved_model.save(module, str(folder), signatures={"serving_default": gather})
    keys = {stack.name: f"{stack.name}/.ATTRIBUTES/VARIABLE_VALUE" for stack in plan.stacks}
    return SavedGraph(
        keys,
        signatures={},
        features=(),
        vocabularies=(),
        padding={},
        packing=Packing(),
        from_activations=FromActivations(left_out="of a test"),
    )
