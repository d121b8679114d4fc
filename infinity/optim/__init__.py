"""Update rules, what makes them of a configuration or of a torch optimizer, and learning-rate schedules.

A rule steps segments of sub-groups in place; it knows neither modules nor the other ranks.
"""
