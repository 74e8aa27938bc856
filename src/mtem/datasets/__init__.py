"""Published data sets, converted to files that `mtem.data` reads, and the bundled sample."""
