"""Statistics of assisted generation: acceptance, speed, and the time of a round's phases."""
