"""What a configuration needs on hardware that is not here (level 8)."""
