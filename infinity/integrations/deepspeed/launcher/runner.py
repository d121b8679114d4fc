"""`deepspeed.launcher.runner`: the file into which accelerate writes variables for ranks on other machines."""

DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"
