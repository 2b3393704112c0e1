"""The environments that come with Palestra."""
