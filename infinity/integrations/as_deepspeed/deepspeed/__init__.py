"""Forwards to `infinity.integrations.deepspeed`."""

from infinity.integrations.deepspeed.as_module import alias

alias(__name__)
