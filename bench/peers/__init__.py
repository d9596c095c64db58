"""The sides of a comparison, each run as its own process that answers one measurement after another."""
