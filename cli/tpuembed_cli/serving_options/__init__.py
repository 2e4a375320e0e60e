"""Groups of options of `tpuembed serve`, each with what it makes of their values."""
