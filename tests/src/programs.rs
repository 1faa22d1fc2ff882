//! C programs.
