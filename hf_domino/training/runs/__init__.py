"""What lets a run be stopped and gone on with: checkpoints, what a folder belongs to, averaged weights."""
