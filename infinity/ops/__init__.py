"""The operations of the native libraries in `csrc/`, each with a bit-identical Python fallback.

No other package calls the libraries. `adam` steps the optimizer on pieces of `rules`, `kernels` runs on CUDA devices,
`aio` moves bytes between memory and a `file`, `build` finds or builds the libraries. The fallbacks are `reference` and
`aio_fallback`. Importing this package loads nothing.
"""
