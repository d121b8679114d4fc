"""Checkpoints: the plan's partitions in files, addressed by tensor name and range of elements."""
