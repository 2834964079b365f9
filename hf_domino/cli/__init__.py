"""The `hf-domino` command: `main` finds the subcommand, and each subcommand has its own module."""
