"""Models in object stores: their versions are pulled into a cache folder, and loaded from there."""
