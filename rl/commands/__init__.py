"""What each word of the command line does."""
