"""The only door to the native libraries in `csrc/`: what they do, each with a Python fallback that gives the same bits.

`adam` steps the optimizer (`piece`: on what), `aio` moves bytes between memory and files (`file`: which), `build`
finds or builds the libraries, `transfer` waits for copies, `reference` and `aio_reference` are the Python fallbacks.
Importing this package loads nothing.
"""
