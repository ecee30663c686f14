"""Progress: waiting, nonblocking operations, control messages and the watchdog."""
