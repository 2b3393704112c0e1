"""How a group of scored trajectories becomes credit. One file per algorithm."""
