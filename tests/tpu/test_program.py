"""What is read of lowered text, on a text written by hand."""

import pytest

from tests.tpu import shims
from tests.tpu.controls import CONTROLS, CONTROLS_OF_COPIES
from tests.tpu.host import check_buffers_of_hosts
from tests.tpu.program import Program

STEP = """module attributes {tf.devices = {"TPU:0"}} {
  func.func @main(%arg0: tensor<64xi32>, %arg1: tensor<64xi32>, %arg2: tensor<64xi32>, %arg3: tensor<64xf32>, %arg4: tensor<32x8xf32> {tf.aliasing_output = 1 : i64}, %arg5: tensor<4x8xf32>) -> (tensor<f32>, tensor<32x8xf32>) {
    %cst = stablehlo.constant dense<3.000000e-01> : tensor<f32>
    %0 = stablehlo.custom_call @SparseDenseMatmulWithMinibatchingOp(%arg0, %arg2, %arg1, %arg3, %cst, %arg4, %cst) {mhlo.frontend_attributes = {_xla_max_ids_per_partition = "64", _xla_max_unique_ids_per_partition = "32", _xla_sharding_strategy = "mod"}} : (tensor<64xi32>, tensor<64xi32>, tensor<64xi32>, tensor<64xf32>, tensor<f32>, tensor<32x8xf32>, tensor<f32>) -> tensor<4x8xf32>
    %1 = stablehlo.subtract %0, %arg5 : tensor<4x8xf32>
    %2:2 = "stablehlo.reduce"(%1, %cst) ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %7 = stablehlo.add %cst, %b : tensor<f32>
      stablehlo.return %7 : tensor<f32>
    }) : (tensor<4x8xf32>, tensor<f32>) -> tensor<f32>
    %3 = "stablehlo.cross-replica-sum"(%2#0) <{replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>}> : (tensor<f32>) -> tensor<f32>
    %4 = stablehlo.add %arg4, %arg4 : tensor<32x8xf32>
    return %3, %4 : tensor<f32>, tensor<32x8xf32>
  }
  func.func private @sgd_optimizer_builder.1(%arg0: tensor<1x8xf32>) -> tensor<1x8xf32> {
    return %arg0 : tensor<1x8xf32>
  }
}
"""  # noqa: E501 - as TensorFlow writes it


def test_what_depends_on_what() -> None:
    program = Program(STEP)
    assert program.reached("%3") >= {"%arg5", "%arg4", "%cst", "%0"}
    assert program.reached("%4") == {"%4", "%arg4"}
    assert program.updated() == {"%arg4": "%4"}
    assert program.results == ["%3", "%4"]
    assert sorted(program.functions) == ["main", "sgd_optimizer_builder.1"]


def test_a_custom_call() -> None:
    [call] = Program(STEP).calls("SparseDenseMatmulWithMinibatchingOp")
    assert call.arguments() == ["%arg0", "%arg2", "%arg1", "%arg3", "%cst", "%arg4", "%cst"]
    assert call.kinds()[3:6] == ["tensor<64xf32>", "tensor<f32>", "tensor<32x8xf32>"]
    assert call.attribute("_xla_max_ids_per_partition") == "64"


def test_a_product_by_somebody_unknown() -> None:
    [control] = CONTROLS_OF_COPIES
    kinds = "(tensor<2x3xf32>, tensor<8x3xf32>) -> tensor<2x8xf32>"
    product = f"%46 = stablehlo.dot_general %43, %arg3, contracting_dims = [1] x [1] {{a = {{b}}}} : {kinds}"
    assert control.change(product) == f"%46 = stablehlo.custom_call @Nobody(%43, %arg3) : {kinds}"


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.name)
def test_controls_change_a_step(control: object) -> None:
    change, topology = control.change, control.topology  # type: ignore[attr-defined]
    assert (change(STEP) != STEP) or topology


# ---- shims


def test_a_sum_over_replicas_is_an_all_reduce() -> None:
    text = shims.all_reduce(STEP)
    assert "cross-replica-sum" not in text
    assert '"stablehlo.all_reduce"(%2#0)' in text
    assert "replica_groups = dense<[[0, 1]]>" in text


def test_one_program_takes_what_it_calls_and_nothing_else() -> None:
    text = STEP.replace("func.func @main(", "func.func private @_func(", 1).replace(
        "    return %3", "    func.call @sgd_optimizer_builder.1(%4)\n    return %3"
    )
    host = '  func.func @main() {\n    "tf_device.cluster_func"() <{func = @_func}>\n    return\n  }\n'
    module = shims.one_program(text.replace(" {\n  func", " {\n" + host + "  func", 1), "_func")
    assert sorted(Program(module).functions) == ["main", "sgd_optimizer_builder.1"]
    assert "cluster_func" not in module
    assert module.startswith("module attributes {tf.devices")


def test_bounds_become_sizes() -> None:
    bounded = "%arg0: tensor<?xi32, #mhlo.type_extensions<bounds = [2048]>>"
    assert shims.bounds_as_sizes(bounded) == "%arg0: tensor<2048xi32>"


def test_annotations_go_and_aliases_stay() -> None:
    head = (
        r'(%arg0: tensor<8xf32> {mhlo.sharding = "\08\01\1A"}, %arg1: tensor<f32> {mhlo.is_same_data_across_replicas = true, '
        r'mhlo.sharding = "\08\01", tf.aliasing_output = 1 : i64}) -> (tensor<f32> {mhlo.sharding = "\08\01"})'
    )
    assert shims.no_annotations(head) == (
        "(%arg0: tensor<8xf32>, %arg1: tensor<f32> {tf.aliasing_output = 1 : i64}) -> (tensor<f32>)"
    )


def test_every_shim_says_what_it_does_in_a_sentence() -> None:
    for name in shims.SHIMS:
        assert shims.sentence(name).endswith("."), name


# ---- buffers of the hosts

BRIDGED = """
    %5:5 = "tf_device.launch"() <{device = "CPU:0"}> ({
      %pointers, %samples, %rows, %gains, %u, %n = "tf.ConvertToSparseCoreCsrWrappedCooTensor"(%1) {feature_width = 8 : i64} : ()
      %7:4 = "tf.TPUCopyWithDynamicShape"(%pointers, %samples, %rows, %gains, %u) : ()
      tf_device.return %n, %7#0, %7#1, %7#2, %7#3 : tensor<i32>
    }) : () -> (tensor<i32>)
    %6 = "tf_device.cluster_func"(%5#1, %5#2, %5#3, %5#4, %table, %target) <{func = @_func}> : ()
"""


@pytest.mark.parametrize(
    ("swapped", "caught"),
    [
        ({}, False),
        ({"%5#2, %5#3": "%5#3, %5#2"}, True),
        ({"(%5#1": "(%5#2"}, True),
        ({"width = 8": "width = 16"}, True),
    ],
)
def test_which_buffer_is_which(swapped: dict[str, str], caught: bool) -> None:
    text = BRIDGED
    for old, new in swapped.items():
        text = text.replace(old, new)
    found = check_buffers_of_hosts(text, [Program(STEP)], ["SparseDenseMatmulWithMinibatchingOp"])
    assert bool(found) == caught
