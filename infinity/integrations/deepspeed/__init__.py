"""DeepSpeed's names, for programs that were written with them; each is thin over a public verb of ours.

    import infinity.deepspeed as deepspeed            one line changed; touches nothing global
    infinity run --as-deepspeed train.py              no line changed: `import deepspeed` finds these names
    infinity.deepspeed.install()                      the same in a notebook, before transformers is imported

The configuration is read with DeepSpeed's conventions: a key that nobody knows is a warning, and without an optimizer
in the file or in the call the engine has none. `modules` is the table of the names, `as_module` serves it.
"""
