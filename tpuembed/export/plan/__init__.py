"""Makes the plan of an export: which rows go into which file, in which form.

A plan is data, and making it writes nothing.
"""
