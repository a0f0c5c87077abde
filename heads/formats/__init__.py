"""Draft heads in the layouts of serving engines: one file per layout, names and shapes in both directions."""
