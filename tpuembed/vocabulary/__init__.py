"""Names of rows: strings or 64-bit integers that stand for the rows of a table.

`Vocabulary` numbers names, finds them, and is saved as one array of bytes. It imports no TensorFlow.
"""

from tpuembed.vocabulary.saved import VocabularyHeader, attribute_of
from tpuembed.vocabulary.vocabulary import UNKNOWN, Vocabulary

__all__ = ["UNKNOWN", "Vocabulary", "VocabularyHeader", "attribute_of"]
