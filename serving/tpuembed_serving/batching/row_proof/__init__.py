"""Whether requests of a SavedModel's signature may share a run: a proof from its graph, without running it.

What has to be shown: the outputs of rows put behind each other are the outputs of these rows alone, put behind each other, and a
run that succeeds is one in which each request alone would have. All inputs of a run have the same sizes but the first.
"""

from tpuembed_serving.batching.row_proof.walk import Verdict, prove

__all__ = ["Verdict", "prove"]
