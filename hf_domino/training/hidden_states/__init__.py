"""Hidden states of the target, written once and read in every epoch: a folder of shards, and the code to write it."""
