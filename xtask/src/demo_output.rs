//! Output of the demo, with and without a testbed.

/// Prints a line with the prefix `demo:`.
pub(crate) fn print_demo_line(line: &str) {
    println!("demo: {line}");
}
