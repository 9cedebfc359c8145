"""The mathematics of the recipe: arrays in, arrays out, no model, no config."""
