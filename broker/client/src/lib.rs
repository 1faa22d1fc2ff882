//! Joins a broker session from inside or outside the virtual machine.
