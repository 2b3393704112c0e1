"""What samples the policy's tokens, behind one protocol."""
