"""The conversion of rows to their storage types, and the error that it makes."""
