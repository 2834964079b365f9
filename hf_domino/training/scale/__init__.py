"""Where weights lie and what they take: sharded or placed targets, packed rows, an estimate before a run."""
