"""Writes a version that links the data files of its base and has the changed rows beside them.

Such a version is an ordinary one: any server loads it. Only its graph knows about the overlay; see `graph.stacked_tables`.
"""
