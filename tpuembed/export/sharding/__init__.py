"""Divides the tables of an export among several servers. Each gets a MODEL_DIR of its own, an ordinary export of its features."""
