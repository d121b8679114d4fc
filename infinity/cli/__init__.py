"""The command line `infinity`: questions about a machine, a configuration or a checkpoint, outside of a program."""
