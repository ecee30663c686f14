"""Everything that touches MPI: private communicators, buffers, operations, waiting, running schedules."""
