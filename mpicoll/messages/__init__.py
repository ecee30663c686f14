"""Schedules over point-to-point messages, and the MPI library's own collectives."""
