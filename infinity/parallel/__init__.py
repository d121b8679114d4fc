"""The tensor axis at run time: what a rank's modules exchange with the other ranks of its tensor group."""
