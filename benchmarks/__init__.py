"""What produces every number in the documentation."""
