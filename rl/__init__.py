"""What to learn from it: credit, objectives, batches, the learner, the loop and the command line."""
