//! The message broker of a session of workers that come and go.

fn main() {}
