"""Where MPI is touched: private communicators, buffers, operations, waiting, running schedules."""
