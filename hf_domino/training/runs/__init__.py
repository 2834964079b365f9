"""What lets a run be stopped and gone on with: whole checkpoints, and what a folder belongs to."""
