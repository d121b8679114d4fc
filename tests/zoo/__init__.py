"""The zoo: many families of transformers, each from a small configuration, trained against plain torch."""
