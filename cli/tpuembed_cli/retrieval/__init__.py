"""Exports of retrieval: their options and recall."""
