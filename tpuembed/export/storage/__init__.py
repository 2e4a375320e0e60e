"""The types that rows are stored in, how values are converted to them, and the error that this makes."""
