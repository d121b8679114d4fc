"""Process groups and collectives: ranks talk here and nowhere else. Knows tensors, not tiers."""
