"""The training loop, its settings, optimizer, devices and checkpoints."""
