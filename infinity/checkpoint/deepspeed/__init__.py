"""Checkpoints that DeepSpeed has written, as a source of `load_checkpoint`, `infinity ckpt` and exports.

    torch_file -> layout (partitions) or universal -> run_state -> checkpoint

Nothing here imports DeepSpeed, or executes anything that a file names.
"""
