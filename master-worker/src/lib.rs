//! Master-worker programs on a Sempa virtual machine: a driver, tasks and workers that come and go.
