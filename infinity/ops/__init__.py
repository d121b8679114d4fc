"""The only door to the native libraries in `csrc/`: what they do, each with a plain twin that gives the same bits.

`adam` steps the optimizer (`piece`: on what), `aio` moves bytes between memory and files (`file`: which), `build`
finds or builds the libraries, `transfer` waits for copies, `reference` and `aio_reference` are the plain twins.
Importing this package loads nothing.
"""
