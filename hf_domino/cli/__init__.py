"""The `hf-domino` command: `main` finds the subcommand, and each subcommand is a module of its own."""
