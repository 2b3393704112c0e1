"""Tasks as others write them: their folders and files, read into ours."""
