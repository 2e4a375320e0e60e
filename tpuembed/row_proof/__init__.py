"""Proves from a SavedModel's graph, without running it, that requests of a signature can be batched.

The proof shows two things. The outputs of concatenated rows are the concatenated outputs of these rows alone. If a batch
succeeds, each of its requests alone would succeed. All inputs of a batch have the same sizes except the first.
"""

from typing import Final

from tpuembed.row_proof.walk import Verdict, prove

__all__ = ["VERSION", "Verdict", "prove"]

VERSION: Final = 1
"""The version of the proof, which exports keep with its verdicts. Raise it with each change of a rule, or of a reason's text: a
server then ignores the verdicts of earlier exports, which may be wrong, and proves again.
"""
