"""The operations of the native libraries in `csrc/`, each with a bit-identical Python fallback.

No other package calls the libraries. `adam` steps the optimizer on `piece`s, `kernels` runs on CUDA devices, `aio`
moves bytes between memory and a `file`, `build` finds or builds the libraries, `transfer` waits for copies. The
fallbacks are `reference` and `aio_reference`. Importing this package loads nothing.
"""
