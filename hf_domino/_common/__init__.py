"""What every room needs and no room is about: errors, whole files, late names, where a measurement comes from."""
