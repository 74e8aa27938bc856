"""Published data sets, turned into files that the other rooms read, and the bundled sample."""
