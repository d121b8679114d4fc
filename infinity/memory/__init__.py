"""The tiered memory manager: partitions with homes on GPU, CPU or NVMe, and the store, their only mover."""
