"""The content and origin of an export: the contract between exporter and server, free of TensorFlow.

The manifest is at `<version>/assets.extra/tpuembed.json`; TensorFlow Serving ignores that folder.
"""

from tpuembed.manifest.entries import (
    LAYOUTS,
    ActivationEntry,
    ArrayEntry,
    BaseEntry,
    FeatureEntry,
    FileEntry,
    FromActivations,
    HistoryEntry,
    NamesEntry,
    OverlayEntry,
    PackedInput,
    PackedOutput,
    Packing,
    QuantizationEntry,
    RetrievalEntry,
    RowProofEntry,
    RowStoreEntry,
    StackEntry,
    TableEntry,
    TensorSpec,
    VocabularyEntry,
)
from tpuembed.manifest.manifest import LOOKUP_SCOPE, MANIFEST_PATH, NAMES_FOLDER, Folder, Manifest
from tpuembed.manifest.storages import STORAGE_TYPES, STORAGES

__all__ = [
    "LAYOUTS",
    "LOOKUP_SCOPE",
    "MANIFEST_PATH",
    "NAMES_FOLDER",
    "STORAGES",
    "STORAGE_TYPES",
    "ActivationEntry",
    "ArrayEntry",
    "BaseEntry",
    "FeatureEntry",
    "FileEntry",
    "Folder",
    "FromActivations",
    "HistoryEntry",
    "Manifest",
    "NamesEntry",
    "OverlayEntry",
    "PackedInput",
    "PackedOutput",
    "Packing",
    "QuantizationEntry",
    "RetrievalEntry",
    "RowProofEntry",
    "RowStoreEntry",
    "StackEntry",
    "TableEntry",
    "TensorSpec",
    "VocabularyEntry",
]
