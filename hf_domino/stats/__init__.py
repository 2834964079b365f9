"""Statistics of assisted generation: acceptance, speed, and the time that each phase of a round takes."""
