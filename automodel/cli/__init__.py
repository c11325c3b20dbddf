"""The command line; a sub-command imports what it needs only when it runs."""
