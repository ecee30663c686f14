"""Progress of operations: waiting, the progress engine, control messages and the watchdog."""
