"""One module for each command of `ddp-hpc`; it defines the options and calls the code behind the command."""
