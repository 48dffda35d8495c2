"""The subcommands of the command line, one file each; each is imported when it is called."""
