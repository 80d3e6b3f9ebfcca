"""The CLI's commands, one a file."""
