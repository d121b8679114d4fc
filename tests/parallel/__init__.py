"""The tensor axis at run time, on ranks of gloo."""
