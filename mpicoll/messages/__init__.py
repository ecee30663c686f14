"""Execution of schedules by point-to-point messages, and the MPI library's own collectives."""
