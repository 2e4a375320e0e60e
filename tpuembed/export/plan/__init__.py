"""Makes the plan of an export: which rows are written to which file, in which format.

A plan is data. Making it writes nothing.
"""
