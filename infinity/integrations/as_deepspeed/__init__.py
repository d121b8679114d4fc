"""With this folder first on PYTHONPATH, `import deepspeed` gives the names of `infinity.integrations.deepspeed`."""
