"""Exports of retrieval: their options, recall and vectors."""
