//! Pure state machine of a master-worker run: tasks, workers, attempts, policies and statistics.
