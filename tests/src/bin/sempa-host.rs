//! The first processes of a testbed host. Not for people: the testbed starts it.

use std::path::Path;

fn main() -> anyhow::Result<()> {
    let args: Vec<String> = std::env::args().collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [_, "outer", plan] => sempa_tests::hosts::outer(Path::new(plan)),
        [_, "init", plan] => sempa_tests::hosts::init(Path::new(plan)),
        _ => anyhow::bail!("sempa-host is started by the testbed, with a plan"),
    }
}
