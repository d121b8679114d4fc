"""The optimizer path: reads GRAD partitions, writes PARAM partitions, sub-group by sub-group. Knows no ranks, no
modules.
"""
