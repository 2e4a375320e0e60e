"""Other libraries' embedding layers, by their names and with their meanings, over tpuembed's own layer.

`tpuembed.compat.tfrs` stands for `tensorflow_recommenders.layers.embedding` and its experimental sibling,
`tpuembed.compat.keras_rs` for `keras_rs.layers`: code written for them runs with the import changed. What they offer and
tables cannot honour is refused by name.
"""

__all__: list[str] = []
