"""The `hf-domino` command: `main` finds the subcommand, each is a module of its own."""
