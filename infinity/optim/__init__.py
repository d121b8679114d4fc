"""The optimizer: it reads GRAD partitions and writes PARAM partitions, one sub-group at a time.

It knows neither modules nor the other ranks.
"""
