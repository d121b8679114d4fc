"""The names of `infinity.integrations.deepspeed`, where `import infinity.deepspeed as deepspeed` looks for them."""

from infinity.integrations.deepspeed.as_module import alias

alias(__name__)
