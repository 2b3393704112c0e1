"""Judges of exported artefacts. They never share a box or a process with the policy."""
