"""The command line `infinity`: what a user asks about a machine, a configuration or a model outside a program."""
