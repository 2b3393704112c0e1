"""What happened: engines, the renderer, the agent loop and the record of every episode."""
