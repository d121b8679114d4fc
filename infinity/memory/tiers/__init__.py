"""The tiers: the device's memory, pinned CPU memory, and files on NVMe drives."""
